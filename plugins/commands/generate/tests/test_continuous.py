"""Continuous batching: texts that begin and end at different steps have the tokens that they have in a batch."""

from dataclasses import replace
from typing import Any

import pytest
from sampled import CONTEXT, FAMILIES, PROMPTS, TOKENS, built, texts

from mplug import UsageError
from mplug_sampling import continuous
from mplug_sampling.continuous import Lanes
from mplug_sampling.decoding import Ranks
from mplug_sampling.filling import LaneText, fill_lanes
from mplug_sampling.sampling import Sampling, sample_key
from mplug_sampling.token_steps import Replays
from mplug_testing import run_workers
from mplug_testing.recording import Operations

SAMPLINGS = (Sampling(1.0), Sampling(0.0), Sampling(2.0, top_k=100, top_p=0.9, seed=7))
LONGER = ("mixtral", "llama", "qwen", "gpt-oss")
SOME = [pytest.param(name, marks=pytest.mark.wide("families")) if name in LONGER else name for name in FAMILIES]


def staggered(lanes: Lanes, num_lanes: int) -> list[list[int]]:
    """The texts of all prompts: each step, one more begins where a lane is free, and each ends after its own number."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    waiting, running = list(range(len(PROMPTS))), dict[int, int]()
    while waiting or running:
        free = [lane for lane in range(num_lanes) if lane not in running]
        if waiting and free:
            number, sampling = waiting.pop(0), SAMPLINGS[len(waiting) % len(SAMPLINGS)]
            running[free[-1]] = number
            found[number].append(lanes.begin(free[-1], PROMPTS[number], sample_key(sampling.seed), sampling))
        for lane, token in enumerate(lanes.step()):
            if lane in running:
                found[running[lane]].append(token)
        for lane, number in list(running.items()):
            if len(found[number]) >= TOKENS - number % 3:
                lanes.end(lane)
                del running[lane]
    return found


def expected(settings: dict[str, Any]) -> list[list[int]]:
    _, sampler = built(settings)
    found = []
    for number, prompt in enumerate(PROMPTS):
        sampling = SAMPLINGS[(len(PROMPTS) - 1 - number) % len(SAMPLINGS)]
        (text,) = texts(sampler, [prompt], sampling=sampling)
        found.append(text[: TOKENS - number % 3])
    return found


@pytest.mark.wide("families", quick=["deepseek"])
@pytest.mark.parametrize("family", SOME)
def test_texts_in_lanes_have_the_tokens_of_texts_alone(family: str) -> None:
    _, sampler = built(FAMILIES[family])
    assert staggered(Lanes(sampler, 3, CONTEXT), 3) == expected(FAMILIES[family])


def test_replayed_steps_give_the_same_tokens() -> None:
    _, sampler = built(FAMILIES["gemma"])
    replays = Replays(Operations)
    assert staggered(Lanes(sampler, 3, CONTEXT, replays=replays), 3) == expected(FAMILIES["gemma"])
    assert replays.num_recorded == 1


def of_rank(settings: dict[str, Any]) -> list[list[int]]:
    run, sampler = built(settings)
    return staggered(Lanes(sampler, 3, CONTEXT, Ranks(run, sampler)), 3)


@pytest.mark.parametrize(
    ("layout", "family"), [("tp2", "llama"), pytest.param("tp2ep2", "mixtral", marks=pytest.mark.wide("layouts"))]
)
def test_a_layout_gives_the_tokens_of_one_process(layout: str, family: str) -> None:
    for found in run_workers(2, of_rank, {**FAMILIES[family], "parallel.layout": layout}):
        assert found == expected(FAMILIES[family])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"model.num_layers": 4, "parallel.layout": "pp1", "parallel.pp.schedule": "zb-v"}, "chunks of a pipeline")],
)
def test_what_texts_that_begin_at_different_steps_cannot_have_is_refused(changes: dict[str, Any], reason: str) -> None:
    run, sampler = built({**FAMILIES["llama"], **changes})
    with pytest.raises(UsageError, match=reason):
        Lanes(sampler, 3, CONTEXT, Ranks(run, sampler))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_device_that_is_one_step_ahead_computes_the_same_completions(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of all lengths, also of one token; prompts that repeat, together and alone; log-probabilities too."""
    _, sampler = built(FAMILIES["gemma"])
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    texts = [LaneText(prompt, 50 + number, Sampling(1.0)) for number, prompt in enumerate(prompts)]
    found: list[list[tuple[int, float]]] = [[] for _ in texts]

    def take(number: int, token: int, score: float) -> bool:
        found[number].append((token, score))
        return token % 8 == 0 or len(found[number]) == 1 + number % TOKENS

    replays = Replays(Operations) if replayed else None
    fill_lanes(Lanes(sampler, 5, CONTEXT, replays=replays), texts, take, TOKENS)
    ahead, found = found, [[] for _ in texts]
    texts = [replace(one, taken=[]) for one in texts]
    monkeypatch.setattr(continuous, "TOGETHER", 1)
    fill_lanes(Lanes(sampler, 5, CONTEXT), texts, take)
    assert len({len(one) for one in found}) > 4
    for one, other in zip(ahead, found, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], rel=1e-11)
