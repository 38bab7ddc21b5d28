"""Which token a number draws: temperature, top-k and nucleus."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_generate import decoding
from mplug_generate import sampling as drawing
from mplug_generate.sampler import Sampler
from mplug_generate.sampling import Sampling, sample_key
from torch import Tensor, nn

from mplug import Flops, Model, Plan, Unit

PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log() + 3.5
"""Logits are known up to a constant. From the likeliest: tokens 1, 3, 4, 2, 0."""
GRID = 2000


def choose(logits: Tensor, sampling: Sampling, draw: Tensor) -> int:
    """The token of one sample; the function under test chooses for several at once."""
    both = drawing.choose(torch.stack((logits.flip(0), logits)), sampling, torch.stack((1 - draw, draw)))
    return int(both[1])


def draws() -> list[Tensor]:
    """The midpoints of a grid on [0, 1), and its two ends."""
    middles = [(number + 0.5) / GRID for number in range(GRID)]
    return [torch.tensor(value, dtype=torch.float64) for value in (0.0, *middles, 1 - 2.0**-24)]


def frequencies(sampling: Sampling, logits: Tensor = LOGITS) -> list[float]:
    chosen = [choose(logits, sampling, draw) for draw in draws()[1:-1]]
    return [chosen.count(token) / GRID for token in range(len(logits))]


def drawn(sampling: Sampling, logits: Tensor = LOGITS) -> set[int]:
    return {choose(logits, sampling, draw) for draw in draws()}


def test_temperature_one_draws_each_token_as_often_as_it_is_likely() -> None:
    assert frequencies(Sampling()) == pytest.approx(PROBABILITIES, abs=2 / GRID)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 10.0])
def test_a_temperature_sharpens_or_flattens(temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    expected = [power / sum(powers) for power in powers]
    assert frequencies(Sampling(temperature=temperature)) == pytest.approx(expected, abs=2 / GRID)


def test_temperature_zero_takes_the_likeliest_whatever_is_drawn() -> None:
    assert drawn(Sampling(temperature=0)) == {1}
    assert drawn(Sampling(temperature=0, top_k=2, top_p=0.1)) == {1}


def test_a_small_temperature_is_finite_and_takes_the_likeliest() -> None:
    assert drawn(Sampling(temperature=1e-4)) == {1}


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(1, {1}), (2, {1, 3}), (3, {1, 3, 4}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4}), (0, {0, 1, 2, 3, 4})],
)
def test_top_k_keeps_exactly_the_k_likeliest(top_k: int, kept: set[int]) -> None:
    sampling = Sampling(top_k=top_k)
    assert drawn(sampling) == kept
    share = sum(PROBABILITIES[token] for token in kept)
    expected = [p / share if token in kept else 0 for token, p in enumerate(PROBABILITIES)]
    assert frequencies(sampling) == pytest.approx(expected, abs=2 / GRID)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.64, {1, 3}),
        (0.66, {1, 3, 4}),
        (0.84, {1, 3, 4}),
        (0.86, {1, 2, 3, 4}),
        (0.94, {1, 2, 3, 4}),
        (0.96, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_exactly_the_smallest_set_that_holds_the_probability(top_p: float, kept: set[int]) -> None:
    sampling = Sampling(top_p=top_p)
    assert drawn(sampling) == kept
    share = sum(PROBABILITIES[token] for token in kept)
    expected = [p / share if token in kept else 0 for token, p in enumerate(PROBABILITIES)]
    assert frequencies(sampling) == pytest.approx(expected, abs=2 / GRID)


def test_top_p_is_a_share_of_what_top_k_has_kept() -> None:
    # Of 0.4, 0.25 and 0.2 the first is 0.47 and the first two are 0.76 of the sum.
    assert drawn(Sampling(top_k=3, top_p=0.5)) == {1, 3}
    assert drawn(Sampling(top_k=3, top_p=0.45)) == {1}


def test_top_p_is_a_share_after_the_temperature() -> None:
    flat = Sampling(temperature=1e6, top_p=0.5)  # five tokens of 0.2 each
    assert drawn(flat) == {1, 3, 4}


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 0.0], dtype=torch.float64)
    assert drawn(Sampling(), logits) == {1, 3}
    assert drawn(Sampling(temperature=0), logits) == {1}


def test_equal_tokens_are_kept_in_their_order() -> None:
    logits = torch.zeros(4, dtype=torch.float64)
    assert drawn(Sampling(top_k=2), logits) == {0, 1}
    assert drawn(Sampling(temperature=0), logits) == {0}


def test_a_token_owns_its_share_of_the_draws_without_the_upper_end() -> None:
    logits = torch.zeros(4, dtype=torch.float64)
    chosen = [choose(logits, Sampling(), torch.tensor(draw, dtype=torch.float64)) for draw in (0, 0.25, 0.5, 0.75)]
    assert chosen == [0, 1, 2, 3]


@settings(max_examples=100)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.01, 5),
    st.integers(0, 14),
    st.floats(1e-6, 1),
)
def test_whatever_is_drawn_is_among_the_k_likeliest_and_inside_the_nucleus(
    logits: list[float], draw: float, temperature: float, top_k: int, top_p: float
) -> None:
    chosen = choose(
        torch.tensor(logits, dtype=torch.float64),
        Sampling(temperature, top_k, top_p),
        torch.tensor(draw, dtype=torch.float64),
    )
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    likelier = sorted((w for w in weights if w > weights[chosen] * (1 + 1e-9)), reverse=True)
    assert len(likelier) < (top_k or len(logits))
    kept = sum(sorted(weights, reverse=True)[: top_k or len(logits)])
    assert sum(likelier) / kept < top_p + 1e-6


# Sampling from a model: here one whose next token is a function of the window that it sees.


class Counter(nn.Module):
    """The logits of a position favour the number of tokens seen up to it, plus the token there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.windows: list[list[int]] = []

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert not self.training
        self.windows.append(tokens[0].tolist())
        assert torch.equal(positions, torch.arange(tokens.shape[1])[None])
        favoured = (tokens + positions + 1) % 50
        return torch.nn.functional.one_hot(favoured, 50).float() * 40


def counting() -> tuple[Sampler, Counter]:
    counter, sampler = Counter(), Sampler()
    unit = Unit("counter", ("tokens", "positions"), ("logits",))
    plan = Plan((), {}, {}, {}, Flops(0, 0), inference=(unit,))
    sampler.model = Model(nn.ModuleDict({"counter": counter}).train(), plan)
    sampler.uncached = "its module declares nothing"
    return sampler, counter


def sample(sampler: Sampler, prompt: list[int], num_tokens: int, context: int, sampling: Sampling) -> list[int]:
    found: list[int] = []
    keys = [sample_key(sampling.seed)]
    decoding.sample(sampler, [prompt], keys, num_tokens, context, sampling, lambda _, token: bool(found.append(token)))
    return found


def test_a_prompt_that_comes_again_gets_other_numbers() -> None:
    keys = [sample_key(seed, number) for seed in (0, 1) for number in (0, 1, 2)]
    assert len(set(keys)) == 6


def test_each_token_follows_from_the_last_tokens_of_the_context() -> None:
    sampler, counter = counting()
    assert sample(sampler, [5, 1], 4, 3, Sampling(temperature=0)) == [3, 6, 9, 12]
    assert counter.windows == [[5, 1], [5, 1, 3], [1, 3, 6], [3, 6, 9]]


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    sampler, _ = counting()
    hot = [sample(sampler, [5], 40, 8, Sampling(temperature=100.0, seed=seed)) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert len(set(hot[0])) > 10


def test_tokens_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    assert drawn(Sampling(vocab_size=3)) == {0, 1, 2}
    assert frequencies(Sampling(vocab_size=2))[:2] == pytest.approx([1 / 9, 8 / 9], abs=2 / GRID)
    assert drawn(Sampling(temperature=0, vocab_size=1)) == {0}
