"""Sampling on a GPU: the step of a token replayed as a CUDA graph gives the tokens of eager steps."""

from typing import Any

import pytest
import torch
from sampled import FAMILIES, PROMPTS, built, texts

from mplug_sampling import continuous, token_steps
from mplug_sampling.continuous import Lanes
from mplug_sampling.fast_steps import compiled_step
from mplug_sampling.filling import LaneText, fill_lanes
from mplug_sampling.sampler import Sampler
from mplug_sampling.sampling import Sampling, choose
from mplug_sampling.token_steps import Replays, replays_for

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {"trainer.device": "cuda", "trainer.precision": "bf16", "model.init_std": 0.2}
FUSED: dict[str, Any] = {"kernels.default": "triton", "kernels.attention": "sdpa"}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**FAMILIES["llama"], **FUSED, "model.hidden_size": 256},
    "scaled rotary": {**FAMILIES["llama"], "model.rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen": FAMILIES["qwen"],
    "gpt": FAMILIES["gpt"],
    "gpt-oss": {**FAMILIES["gpt-oss"], "model.ffn_hidden_size": 32},
    "gemma": FAMILIES["gemma"],
    "deepseek": {**FAMILIES["deepseek"], "model.moe_ffn_hidden_size": 16, "model.kv_lora_rank": 16},
}
SAMPLINGS = {"greedy": Sampling(0.0), "sampled": Sampling(1.0, top_k=50, top_p=0.95, seed=3)}


@pytest.mark.parametrize("family", CASES)
def test_replayed_steps_give_the_tokens_of_eager_steps(family: str) -> None:
    """Uneven prompts; a second batch replays the recording of the first, after which windows have wrapped."""
    run, sampler = built({**CASES[family], **CUDA}, graphs=True)
    replays, reasons = replays_for(run, sampler)
    assert reasons == []
    for sampling in SAMPLINGS.values():
        for prompts in (PROMPTS[:4], PROMPTS[4:]):
            found = texts(sampler, prompts, sampling=sampling, num_tokens=20, replays=replays)
            assert found == texts(sampler, prompts, sampling=sampling, num_tokens=20)
            if sampling.temperature:
                assert len({token for text in found for token in text}) > 10
    assert replays.num_recorded == len(SAMPLINGS)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("family", CASES)
def test_compiled_and_replayed_steps_give_the_tokens_of_eager_steps(family: str) -> None:
    has_experts = family in ("gpt-oss", "deepseek")  # a graph replays them in bf16 only, whose roundings differ
    settings = {"trainer.compile": "inductor", "trainer.tune_kernels": True}
    settings |= {} if has_experts else {"trainer.precision": "fp32"}
    run, sampler = built({**CASES[family], **CUDA, **settings}, graphs=True)
    compiled, _ = compiled_step(run, sampler)
    replays, reasons = replays_for(run, sampler, compiled)
    assert reasons == []
    assert compiled
    eager = Replays(compiled=compiled) if has_experts else Replays()
    for prompts in (PROMPTS[:1], PROMPTS[4:5], PROMPTS[4:]):  # one text has products of its own
        found = texts(sampler, prompts, sampling=SAMPLINGS["sampled"], num_tokens=20, replays=replays)
        assert found == texts(sampler, prompts, sampling=SAMPLINGS["sampled"], num_tokens=20, replays=eager)


def test_a_text_that_outgrows_its_cache_and_its_context_gives_the_tokens_of_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_steps, "MULTIPLE", 8)
    monkeypatch.setattr(token_steps, "FIRST", 8)
    run, sampler = built({**CASES["llama"], **CUDA}, graphs=True)
    replays, _ = replays_for(run, sampler)
    found = texts(sampler, PROMPTS[:2], context=40, num_tokens=45, replays=replays)
    assert replays.num_recorded == 3  # 16, 32 and 40 positions
    assert found == texts(sampler, PROMPTS[:2], context=40, num_tokens=45)


def test_a_long_prompt_gives_the_tokens_of_growing_caches() -> None:
    """The kernel that reads the filled rows against the one that sees no other rows, at many lengths."""
    _, sampler = built({**CASES["llama"], **CUDA, "trainer.precision": "fp16"}, graphs=True)
    prompts = [[*range(1, 250)], [5] * 130]
    static = texts(sampler, prompts, context=400, sampling=SAMPLINGS["greedy"], num_tokens=40)
    sampler.growing = "the test says so"
    growing = texts(sampler, prompts, context=400, sampling=SAMPLINGS["greedy"], num_tokens=40)
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(static, growing, strict=True)]
    assert min(same) >= 20, "roundings differ, so a text may turn after many equal tokens"


def completed(sampler: Sampler, replays: Replays, *, ahead: bool) -> list[tuple[list[int], list[float]]]:
    """The completions of repeated prompts in three lanes, of 3 to 20 tokens, drawn and likeliest ones."""
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    samplings = (Sampling(1.0), Sampling(0.0), SAMPLINGS["sampled"])
    texts = [LaneText(one, 50 + number, samplings[number % 3]) for number, one in enumerate(prompts)]
    scores: list[list[float]] = [[] for _ in texts]

    def take(number: int, token: int, score: float) -> bool:
        scores[number].append(score)
        return token % 16 == 0 or len(scores[number]) == 3 + number % 18

    fill_lanes(Lanes(sampler, 3, 64, replays=replays), texts, take, 20 if ahead else None)
    return [(text.taken, of_text) for text, of_text in zip(texts, scores, strict=True)]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "qwen", "gemma"])
def test_lanes_that_are_one_step_ahead_give_the_completions_of_eager_steps(
    family: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed steps with their draws and prompts computed together, against eager steps and single prompts."""
    settings = {"trainer.precision": "fp32", "trainer.compile": "inductor" if compiles else "never"}
    run, sampler = built({**CASES[family], **CUDA, **settings}, graphs=True)
    replays, reasons = replays_for(run, sampler, compiled_step(run, sampler)[0])
    assert reasons == []
    ahead = completed(sampler, replays, ahead=True)
    assert replays.num_recorded == 1
    monkeypatch.setattr(continuous, "TOGETHER", 1)
    alone = completed(sampler, Replays(), ahead=False)
    same = [one[0] == other[0] for one, other in zip(ahead, alone, strict=True)]
    assert sum(same) >= len(same) - 1, "a draw at the border of two tokens may fall to the other one"
    for (one, other), is_same in zip(zip(ahead, alone, strict=True), same, strict=True):
        assert not is_same or one[1] == pytest.approx(other[1], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tokens_are_drawn_as_on_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, numbers = 4 * torch.randn(64, 50_257, dtype=dtype), torch.rand(64, dtype=torch.float64)
    found = choose(logits.cuda(), Sampling(0.8, vocab_size=50_000), numbers.cuda()).cpu()
    same = found == choose(logits, Sampling(0.8, vocab_size=50_000), numbers)
    assert int(same.sum()) >= 62, "exp and sums differ in the last bits"
