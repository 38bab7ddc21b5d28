"""Sampling on a GPU: the step of a token replayed as a CUDA graph gives the tokens of eager steps."""

from typing import Any

import pytest
from sampled import FAMILIES, PROMPTS, built, texts

from mplug_sampling import token_steps
from mplug_sampling.fast_steps import compiled_step
from mplug_sampling.sampling import Sampling
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
