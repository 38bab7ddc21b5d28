"""Pages of a cache: the tokens of a cache with rows for each lane, bit by bit, with less memory."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from sampled import CONTEXT, FAMILIES, PROMPTS, built

from mplug import UsageError
from mplug_sampling import continuous, paging
from mplug_sampling.continuous import Lanes
from mplug_sampling.decoding import Ranks
from mplug_sampling.pages import Pages
from mplug_sampling.rollouts import Completion, complete
from mplug_sampling.sampling import Sampling
from mplug_sampling.token_steps import Replays
from mplug_testing import run_workers
from mplug_testing.recording import Operations

PAGE = 4
REPEATED = [prompt for prompt in PROMPTS[1:6] for _ in range(3)]
KEYS = [*range(100, 100 + len(REPEATED))]
ENDS = frozenset(range(0, 512, 16))
"""One token of sixteen ends a text, so lengths have a long tail."""
EXPERTS = ("mixtral", "gpt-oss", "deepseek")
"""The products of an expert have as many rows as texts choose it, so rounding depends on the texts of other lanes."""
QUICK = ("gemma",)
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide("families")) for name in FAMILIES]


def lanes_of(sampler: Any, num_lanes: int = 5, **more: Any) -> Lanes:
    return Lanes(sampler, num_lanes, CONTEXT, **more)


def completed(lanes: Lanes, temperature: float = 1.0, order: Sequence[int] = range(len(REPEATED))) -> list[Completion]:
    sampling = Sampling(temperature, top_k=0 if temperature else 1)
    return complete(lanes, [REPEATED[one] for one in order], [KEYS[one] for one in order], 20, sampling, ENDS)


def require_same(found: list[Completion], expected: list[Completion]) -> None:
    """The same tokens; log-probabilities are equal up to the rounding of fp64."""
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, rel=1e-11)


@pytest.mark.parametrize("family", SOME)
def test_pages_give_the_bits_of_rows_for_each_lane(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities, of caches whose windows and states have no pages too.

    Both compute each prompt alone, and attention receives as many rows, because these change the order of sums. So does
    the place of a text among five lanes, not among four, and lanes with rows are one step ahead.
    """
    monkeypatch.setattr(continuous, "TOGETHER", 1)
    monkeypatch.setattr(paging, "FEWEST", CONTEXT)
    _, sampler = built(FAMILIES[family])
    whole = completed(lanes_of(sampler, 4))
    assert len({len(one.tokens) for one in whole}) > 3
    lanes = lanes_of(sampler, 4, cache_tokens=5 * CONTEXT, page_size=PAGE)
    found = completed(lanes)
    require_same(found, whole)
    assert family in EXPERTS or found == whole
    assert lanes.num_put_back == 0


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.wide("families"))])
def test_texts_that_are_put_back_have_the_same_tokens(temperature: float) -> None:
    _, sampler = built(FAMILIES["llama"])
    lanes = lanes_of(sampler, cache_tokens=CONTEXT, page_size=PAGE)
    require_same(completed(lanes, temperature), completed(lanes_of(sampler), temperature))
    assert lanes.num_put_back > 0
    assert lanes.room().takes([1] * CONTEXT)


def test_a_completion_depends_on_no_lane_and_no_other_completion() -> None:
    _, sampler = built(FAMILIES["llama"])
    lanes = lanes_of(sampler, cache_tokens=5 * CONTEXT, page_size=PAGE)
    together = completed(lanes)
    order = Random(1).sample(range(len(REPEATED)), len(REPEATED))
    require_same(completed(lanes, order=order), [together[one] for one in order])
    for one in (0, 7, 14):
        require_same(completed(lanes, order=[one]), [together[one]])


def test_replayed_steps_read_the_pages_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording for each number of pages that attention receives."""
    monkeypatch.setattr(paging, "FEWEST", 2)
    _, sampler = built(FAMILIES["llama"])
    replays = Replays(Operations)
    lanes = lanes_of(sampler, cache_tokens=CONTEXT, page_size=PAGE, replays=replays)
    require_same(completed(lanes), completed(lanes_of(sampler)))
    assert replays.num_recorded > 1
    assert lanes.num_put_back > 0


def of_rank(settings: dict[str, Any]) -> list[tuple[list[Completion], int]]:
    run, sampler = built(settings)
    kinds: list[dict[str, Any]] = [{}, *({"cache_tokens": one * CONTEXT, "page_size": PAGE} for one in (5, 1))]
    found = [lanes_of(sampler, ranks=Ranks(run, sampler), **kind) for kind in kinds]
    return [(completed(lanes), lanes.num_put_back) for lanes in found]


@pytest.mark.wide("layouts")
def test_ranks_that_divide_the_heads_share_the_table() -> None:
    settings = {**FAMILIES["llama"], "parallel.layout": "tp2"}
    first, second = run_workers(2, of_rank, settings)
    assert first == second
    whole, paged, scarce = first
    require_same(paged[0], whole[0])
    require_same(scarce[0], whole[0])
    assert scarce[1] > 0


@pytest.mark.parametrize(
    "pages",
    [{"cache_tokens": 5 * CONTEXT, "page_size": PAGE}, pytest.param({}, marks=pytest.mark.wide("families"))],
)
def test_weights_that_have_changed_compute_all_prompts_again(pages: dict[str, int]) -> None:
    """Also what a latent attention keeps of its weights."""
    _, sampler = built(FAMILIES["deepseek"])
    lanes = lanes_of(sampler, **pages)
    before = completed(lanes)
    with torch.no_grad():
        for parameter in sampler.model.module.parameters():
            parameter.mul_(1.25)
    after = completed(lanes)
    assert after != before
    require_same(after, completed(lanes_of(sampler)))


def test_completions_of_a_prompt_share_its_pages_until_they_write_to_them() -> None:
    pages = Pages(9, 4, 3)
    pages.begin(0, 6)
    pages.share(1)
    assert len(pages.free) == 7
    pages.write(0, 6)
    pages.write(1, 6)
    assert len(pages.copies) == 2
    first, second = pages.of_lane[0], pages.of_lane[1]
    assert first[0] == second[0]
    assert first[1] != second[1]
    pages.end(0)
    assert [target for _, target in pages.copies] == [second[1]]
    pages.end(1)
    pages.forget_prompt()
    assert sorted(pages.free) == [*range(1, 10)]


def test_a_prompt_that_fills_all_pages_begins_again_after_its_text_has_ended() -> None:
    """Its text ends at once, so no page was written; a batch that waits for room would wait forever."""
    _, sampler = built(FAMILIES["llama"])
    lanes = lanes_of(sampler, 1, cache_tokens=CONTEXT, page_size=PAGE)
    prompt = [one % 9 for one in range(CONTEXT - 1)]
    lanes.begin(0, prompt, 1, Sampling(0.0))
    lanes.end(0)
    assert lanes.room().takes(prompt)
    whole = lanes_of(sampler, 1)
    for one in (lanes, whole):
        one.begin(0, prompt, 1, Sampling(0.0))
    assert lanes.step() == whole.step()
    assert lanes.put_back == []


def test_a_cache_without_room_for_one_text_is_refused() -> None:
    _, sampler = built(FAMILIES["llama"])
    with pytest.raises(UsageError, match=f"no room for one text of {CONTEXT} tokens"):
        Lanes(sampler, 3, CONTEXT, cache_tokens=CONTEXT - PAGE, page_size=PAGE)
