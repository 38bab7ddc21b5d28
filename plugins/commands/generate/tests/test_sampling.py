"""Which token a number draws: temperature, top-k and nucleus."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mplug import Flops, Model, Plan, Unit
from mplug_sampling import decoding
from mplug_sampling import sampling as drawing
from mplug_sampling.sampler import Sampler
from mplug_sampling.sampling import Sampling, sample_key

PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log() + 3.5
"""Logits are known up to a constant. From the likeliest: tokens 1, 3, 4, 2, 0."""
GRID = 500


def choose(logits: Tensor, sampling: Sampling, draw: Tensor) -> int:
    """The token of one sample; the function under test chooses for several at once."""
    both = drawing.choose(torch.stack((logits.flip(0), logits)), sampling, torch.stack((1 - draw, draw)))
    return int(both[1])


def draws() -> list[Tensor]:
    """The midpoints of a grid on [0, 1), and its two ends."""
    middles = [(number + 0.5) / GRID for number in range(GRID)]
    return [torch.tensor(value, dtype=torch.float64) for value in (0.0, *middles, 1 - 2.0**-24)]


ALL, POSSIBLE = (0, 1, 2, 3, 4), torch.tensor([-math.inf, 1.0, -math.inf, 0.0], dtype=torch.float64)
EQUAL = torch.zeros(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampling", "kept", "logits"),
    [
        (Sampling(), ALL, LOGITS),
        *((Sampling(temperature=temperature), ALL, LOGITS) for temperature in (0.5, 10.0)),
        (Sampling(temperature=0, top_k=2, top_p=0.1), (1,), LOGITS),
        (Sampling(temperature=1e-4), (1,), LOGITS),
        # The k likeliest.
        *((Sampling(top_k=top_k), kept, LOGITS) for top_k, kept in ((1, (1,)), (3, (1, 3, 4)), (99, ALL))),
        # The smallest set that holds the probability.
        *((Sampling(top_p=top_p), kept, LOGITS) for top_p, kept in ((1e-9, (1,)), (0.64, (1, 3)), (0.66, (1, 3, 4)))),
        # A share of what top-k has kept: of 0.4, 0.25 and 0.2 the first is 0.47 and the first two are 0.76 of the sum.
        (Sampling(top_k=3, top_p=0.45), (1,), LOGITS),
        (Sampling(temperature=1e6, top_p=0.5), (1, 3, 4), LOGITS),  # a share after the temperature: 0.2 each
        # A token that cannot be is never drawn; equal tokens are kept in their order.
        (Sampling(), (1, 3), POSSIBLE),
        (Sampling(top_k=2), (0, 1), EQUAL),
        (Sampling(temperature=0), (0,), EQUAL),
        # Tokens that the tokenizer does not have.
        (Sampling(vocab_size=3), ALL[:3], LOGITS),
        (Sampling(temperature=0, vocab_size=1), (0,), LOGITS),
    ],
    ids=str,
)
def test_the_kept_tokens_are_drawn_as_often_as_they_are_likely_and_no_other(
    sampling: Sampling, kept: tuple[int, ...], logits: Tensor
) -> None:
    chosen = [choose(logits, sampling, draw) for draw in draws()]
    assert {*chosen} == {*kept}
    powers = [math.exp((logits[token] - logits.max()) / (sampling.temperature or 1)) for token in kept]
    expected = [power / sum(powers) for power in powers]
    assert [chosen[1:-1].count(token) / GRID for token in kept] == pytest.approx(expected, abs=2 / GRID)


def test_a_token_owns_its_share_of_the_draws_without_the_upper_end() -> None:
    chosen = [choose(EQUAL, Sampling(), torch.tensor(draw, dtype=torch.float64)) for draw in (0, 0.25, 0.5, 0.75)]
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


def test_each_token_follows_from_the_last_tokens_of_the_context() -> None:
    sampler, counter = counting()
    assert sample(sampler, [5, 1], 4, 3, Sampling(temperature=0)) == [3, 6, 9, 12]
    assert counter.windows == [[5, 1], [5, 1, 3], [1, 3, 6], [3, 6, 9]]


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    sampler, _ = counting()
    hot = [sample(sampler, [5], 40, 8, Sampling(temperature=100.0, seed=seed)) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert len(set(hot[0])) > 10
    keys = {sample_key(seed, number) for seed in (0, 1) for number in (0, 1, 2)}
    assert len(keys) == 6, "a prompt that comes again gets other numbers"
