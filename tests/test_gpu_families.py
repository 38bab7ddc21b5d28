"""Every family trains on one GPU, in bf16 and in FP8, with one and with several micro batches a step.

The reference is the same run in fp32 on the CPU, eager. All of it takes less than five minutes.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gpus import STEPS, Step, trained_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]

Settings = Mapping[str, Any]

BATCH = 8
SIZES: Settings = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, "init_std": 0.06}
SHAPE: Settings = {**SIZES, "num_kv_heads": 2, "ffn_hidden_size": 192}
BALANCE: Settings = {"aux_loss_coefficient": 0.01, "z_loss_coefficient": 0.001}
EXPERTS: Settings = {**BALANCE, "num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 64}
LATENT: Settings = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
GROUPED: Settings = {"moe_router_num_groups": 2, "moe_router_top_groups": 1}
YARN: Settings = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


FAMILIES: dict[str, Settings] = {
    "gpt": {**SHAPE, "qk_norm": True},
    "llama": {**SHAPE, "num_mtp_layers": 1},
    "qwen": {**SHAPE, "qk_norm": True, "tie_embeddings": True},
    "qwen, experts": {**SHAPE, **EXPERTS, "qk_norm": True, "feed_forward_types": ["mlp", "experts"]},
    "gemma": {**SHAPE, "qk_norm": True, "window": 16, "attention_types": ["window", "full"], "logit_soft_cap": 30.0},
    "gpt-oss": {**SIZES, **EXPERTS, "num_kv_heads": 2, "head_dim": 32, "window": 16, "rope_scaling": YARN},
    "deepseek": {
        **SIZES,
        **EXPERTS,
        **LATENT,
        **GROUPED,
        "v_head_dim": 32,
        "ffn_hidden_size": 192,
        "num_dense_layers": 1,
        "num_mtp_layers": 1,
    },
    "mixtral": {**BALANCE, "preset": "tiny", "num_layers": 2},
    "qwen-vl": {"preset": "tiny"},
    "qwen-vl, experts": {"preset": "tiny", **EXPERTS},
    "llava": {"preset": "tiny"},
    "gemma, pictures": {"preset": "tiny-vision"},
}
PICTURES: Settings = {
    "data.name": "mock",
    "data.media": 2,
    "data.media_sides": [16, 64],
    "trainer.seq_length": 256,
}
SEEING = {"qwen-vl", "qwen-vl, experts", "llava", "gemma, pictures"}
"""Families whose samples have pictures of noise here."""
FP8: Settings = {"trainer.base_modules": ["head"], "kernels.linear": "fp8"}
PRECISIONS: dict[str, Settings] = {
    "fp32": {},
    "bf16": {},
    "fp8": FP8,
    "fp8, experts": {**FP8, "kernels.experts": "fp8", "precisions.fp8.scaling": "rowwise"},
}
SINKS: dict[str, Settings] = {"gpt-oss": {"kernels.attention": "reference"}}
"""Attention with attention sinks: the fused core that serves them compiles for minutes (its own tests run it)."""
BOUNDS: dict[str, tuple[float, tuple[float, ...]]] = {
    "bf16": (0.005, (0.04,) * STEPS),
    "fp8": (0.02, (0.05, 0.12, 0.25)),
}
"""Largest relative errors of losses, and of each step's gradient norm. A lost or doubled part of a gradient changes
the norm of the first step by more. Later steps differ more, because each update amplifies the rounding of FP8: on an
H100, the norms of Gemma are off by 0.011, 0.032 and 0.128.
"""


def family(name: str, micro_batches: int, precision: str, device: str, compiler: str = "never") -> Settings:
    """A run of a family: the default run's text, optimizer and kernels."""
    model = FAMILIES[name]
    has_experts = precision == "fp8" and "z_loss_coefficient" in model
    return {
        "model.name": name.partition(",")[0],
        "model.preset": None,
        **{f"model.{field}": value for field, value in model.items()},
        "trainer.seq_length": 64,
        "trainer.global_batch_size": BATCH,
        "trainer.micro_batch_size": BATCH // micro_batches,
        "trainer.precision": precision,
        "trainer.device": device,
        "trainer.compile": compiler,
        "schedule.warmup_steps": 2,
        **(PICTURES if name in SEEING else {}),
        **SINKS.get(name, {}),
        **PRECISIONS["fp8, experts" if has_experts else precision],
        **({"trainer.base_modules": ["decoder.head"]} if (name, precision) == ("llava", "fp8") else {}),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Step]]:
    """The steps of a family in fp32 on the CPU. The balance of experts may cover a micro batch."""

    @cache
    def found(name: str, micro_batches: int) -> list[Step]:
        return trained_steps(tmp_path_factory.mktemp("reference"), family(name, micro_batches, "fp32", "cpu"))

    return found


def check(found: list[Step], expected: list[Step], precision: str) -> None:
    of_loss, of_norm = BOUNDS[precision]
    assert len(found) == STEPS
    assert all(math.isfinite(figure) for step in found for figure in step)
    for number, (own, right) in enumerate(zip(found, expected, strict=True)):
        assert own[0] == pytest.approx(right[0], rel=of_loss), f"the loss of step {number + 1}"
        assert own[1] == pytest.approx(right[1], rel=of_norm[number]), f"the gradient norm of step {number + 1}"


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_fp32(
    tmp_path: Path, reference: Callable[[str, int], list[Step]], name: str, precision: str, micro_batches: int
) -> None:
    found = trained_steps(tmp_path, family(name, micro_batches, precision, "cuda"))
    check(found, reference(name, micro_batches), precision)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_compiled_as_in_fp32(
    tmp_path: Path, reference: Callable[[str, int], list[Step]], name: str
) -> None:
    """`trainer.compile=auto` is the default: inductor on a GPU."""
    found = trained_steps(tmp_path, family(name, 1, "bf16", "cuda", "auto"))
    check(found, reference(name, 1), "bf16")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_default_command_trains_experts(tmp_path: Path, micro_batches: int) -> None:
    """`mplug train --model mixtral --preset tiny --precision bf16 --set trainer.device=cuda`, and two micro batches."""
    command: Settings = {"model.name": "mixtral", "model.preset": "tiny"}
    halves: Settings = {} if micro_batches == 1 else {"trainer.micro_batch_size": BATCH // micro_batches}
    own = {**command, **halves, "trainer.device": "cuda", "trainer.precision": "bf16"}
    exact = {**command, **halves, "trainer.device": "cpu", "trainer.precision": "fp32", "trainer.compile": "never"}
    check(trained_steps(tmp_path / "gpu", own), trained_steps(tmp_path / "cpu", exact), "bf16")
