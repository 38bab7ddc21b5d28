"""CUDA graphs of whole steps: on one GPU and under the data-parallel strategies, bitwise equal to eager steps."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import Watch, with_nccl
from replayed import EXPERTS, GPT, STEPS, Seen, assert_equal, trained
from safetensors.torch import load_file
from scanning import SCANS

from mplug.errors import RunError
from mplug.run.prepare import prepare
from mplug.training.assembly import Parts, build
from mplug.training.loop import train
from mplug_graphs.obstacles import step_obstacles
from mplug_testing import run_workers
from mplug_testing.harness import TinySettings, tiny_config, tiny_run

pytestmark = pytest.mark.gpu
TWO = pytest.mark.gpu(2)

CUDA: TinySettings = {"trainer.device": "cuda", "trainer.precision": "bf16", "model.num_layers": 2}
CONSTANT: TinySettings = {"schedule.weight_decay.name": "constant"}
TRITON: TinySettings = {"kernels.default": "triton", "kernels.attention": "sdpa"}
FUSED: TinySettings = {**GPT, **CUDA, **TRITON, "optimizer.name": "adamw"}
CASES: dict[str, TinySettings] = {
    "bf16": FUSED,
    "compiled": {**FUSED, "trainer.compile": "inductor", "trainer.nonfinite": "skip"},
    "fp32": {**GPT, **CUDA, "trainer.precision": "fp32"},
    "fp16": {**GPT, **CUDA, "trainer.precision": "fp16"},
    "recompute": {**FUSED, "memory.recompute.mode": "full"},
    "compiled recompute": {**FUSED, "memory.recompute.mode": "full", "trainer.compile": "inductor"},
    "experts": {**EXPERTS, **CUDA},
    "torch's fused adamw": {**GPT, **CUDA, **CONSTANT, "trainer.precision": "fp16", "optimizer.name": "adamw"},
    "muon": {**GPT, **CUDA, **CONSTANT, "optimizer.name": "muon"},
}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("case", CASES)
def test_twenty_graphed_steps_are_twenty_eager_steps_to_the_bit(case: str) -> None:
    eager, replayed = trained(CASES[case], False), trained(CASES[case], True)
    assert replayed.recorded == (1 if case == "experts" else 2)
    assert len({tuple(figures["numbers"]) for figures in eager.figures}) == STEPS
    assert_equal(replayed, eager)


WIDE: TinySettings = {**CUDA, "model.hidden_size": 256, "model.num_attention_heads": 4, "model.num_kv_heads": 2}
DELAYED: TinySettings = {"precisions.fp8.when": "delayed", "precisions.fp8.history": 4}
ROWWISE, BLOCKWISE = ({"precisions.fp8.scaling": scaling} for scaling in ("rowwise", "blockwise"))
FP8: TinySettings = {"trainer.precision": "fp8", "trainer.base_modules": ["head"]}
OF_FP8: TinySettings = {**WIDE, **FP8, "kernels.default": "triton", "model.activation": "gelu_tanh"}
FUSED_PRODUCTS = ("kernels.linear", "kernels.norm_product", "kernels.activation_product")
OF_EXPERTS: TinySettings = {**EXPERTS, **CUDA, **FP8, **ROWWISE}
OF_TE: TinySettings = {**OF_FP8, "kernels.linear": "te"}
TE = "transformer_engine"
OF_SCANS: TinySettings = {**CUDA, **SCANS, "trainer.steps": STEPS}
OF_FLA: TinySettings = {
    **OF_SCANS,
    "data.documents": 1,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16,
    "kernels.scan": "fla",
    "kernels.convolution": "fla",
    "kernels.fla.variants": 1,
}
PACKED_HEADS: TinySettings = {
    "kernels.flash.packed_heads": True,
    "model.position": "learned",
    "model.qk_norm": False,
}
KERNELS: dict[str, tuple[str, TinySettings]] = {  # the package that it needs, and a run
    "fp8": ("torch", {**OF_FP8, "kernels.linear": "fp8"}),
    "fp8 delayed": ("torch", {**OF_FP8, **DELAYED, "kernels.linear": "fp8"}),
    "fp8 blockwise": ("torch", {**OF_FP8, **BLOCKWISE, "kernels.linear": "fp8"}),
    "fp8 fused": ("torch", {**OF_FP8, **DELAYED, **dict.fromkeys(FUSED_PRODUCTS, "fp8")}),
    "fp8 experts": ("torch", {**OF_EXPERTS, "kernels.linear": "fp8", "kernels.experts": "fp8"}),
    "fp8 compiled": ("torch", {**OF_FP8, **DELAYED, "kernels.linear": "fp8", "trainer.compile": "inductor"}),
    "te": (TE, {**OF_TE, "kernels.attention": "te", "kernels.norm": "te", "trainer.seq_length": 128}),
    "te delayed": (TE, {**OF_TE, **DELAYED}),
    "te blockwise": (TE, {**OF_TE, **BLOCKWISE}),
    "te fused": (TE, {**OF_FP8, **DELAYED, **dict.fromkeys(FUSED_PRODUCTS, "te")}),
    "scans": ("torch", OF_SCANS),
    "scans compiled": ("torch", {**OF_SCANS, "trainer.compile": "inductor"}),
    "fla": ("fla", OF_FLA),
    "flex": ("torch", {**WIDE, "kernels.attention": "flex"}),
    "flash": ("flash_attn", {**WIDE, "kernels.attention": "flash"}),
    "flash, packed heads": ("flash_attn", {**WIDE, **PACKED_HEADS, "kernels.attention": "flash"}),
    "quack": ("quack", {**WIDE, "kernels.default": "quack"}),
    "quack experts": ("quack", {**EXPERTS, **CUDA, "kernels.experts": "quack"}),
}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compute_the_same_bits_when_replayed(name: str) -> None:
    package, settings = KERNELS[name]
    pytest.importorskip(package)
    has_experts = "model.name" in settings
    changes = settings if has_experts else {**GPT, "model.dropout": 0.0, **settings}
    run = tiny_run(changes)
    parts = build(run)
    if unknown := step_obstacles(run, parts.model):  # plugins that do not state that they can be replayed
        pytest.skip("; ".join(unknown))
    eager, replayed = trained(changes, False), trained(changes, True)
    assert replayed.recorded == (1 if has_experts else 2)
    assert_equal(replayed, eager)


def both(settings: TinySettings) -> tuple[Seen, Seen]:
    """Be one rank of an eager run, and then of a replayed one."""
    with_nccl()
    warnings.simplefilter("ignore")  # the compiler's own
    return trained(settings, False), trained(settings, True)


LAYOUTS: dict[str, TinySettings] = {
    "dp2": {},
    "zero2": {},
    "zero2, stage 2": {"parallel.zero.stage": 2},
    "zero2, compiled": {"trainer.compile": "inductor"},
    "zero2, stage 2, without overlap": {"parallel.zero.stage": 2, "parallel.zero.overlap": False},
}


@TWO
@pytest.mark.parametrize("name", LAYOUTS)
def test_graphed_steps_of_two_gpus_are_eager_steps_to_the_bit(name: str) -> None:
    layout, own = name[:5].strip(","), dict(LAYOUTS[name])
    if layout == "zero2":
        own["parallel.zero.bucket_mib"] = 0.02
    for eager, replayed in run_workers(2, both, {**FUSED, "parallel.layout": layout, **own}):
        assert replayed.recorded == 2
        assert_equal(replayed, eager)


OF_EP: TinySettings = {**EXPERTS, **CUDA, "parallel.layout": "ep2", "kernels.dispatch": "triton"}
"""Every block exchanges rows; with `room` 1.05, some passes have no room for all and run again."""


@TWO
@pytest.mark.parametrize("room", [4.0, 1.05])
@pytest.mark.parametrize("dispatch", ["symmetric", "bounded"])
def test_graphed_steps_of_experts_on_two_gpus_are_eager_steps_to_the_bit(dispatch: str, room: float) -> None:
    own = {"parallel.ep.dispatch": dispatch, "parallel.ep.room": room}
    for eager, replayed in run_workers(2, both, {**OF_EP, **own}):
        assert replayed.recorded == 1
        assert (replayed.figures[-1]["repeated_steps"] > 0) == (room < 2)
        assert_equal(replayed, eager)


def losses(directory: Path, graphs: bool, resume_from: Path | None = None) -> list[float]:
    """Train 12 steps, with evaluations and checkpoints in between."""
    settings = {**CUDA, "trainer.steps": 12, "checkpoint.every": 6, "trainer.eval_every": 5, "trainer.graphs": graphs}
    watch = Watch()
    train(prepare(tiny_config(settings), {"host/watch": watch}, directory), resume_from)
    return watch.losses


def test_a_graphed_run_saves_and_resumes_as_an_eager_one(tmp_path: Path) -> None:
    eager = losses(tmp_path / "eager", graphs=False)
    assert losses(tmp_path / "graphed", graphs=True) == eager
    for step in ("step_00000006", "step_00000012"):
        one, other = (
            load_file(tmp_path / name / "checkpoints" / step / "rank00000.safetensors") for name in ("eager", "graphed")
        )
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    halfway = tmp_path / "graphed" / "checkpoints" / "step_00000006"
    assert losses(tmp_path / "resumed", graphs=True, resume_from=halfway) == eager[6:]


def hooked(hook: Any) -> Any:
    """A change before the first step: a hook after the call of the first block."""

    def change(step: int, parts: Parts) -> None:
        if step == 1:
            parts.model.module.get_submodule("blocks.0").register_forward_hook(hook)

    return change


def test_a_kernel_that_draws_from_torchs_generator_is_found() -> None:
    def draw(module: Any, inputs: Any, output: Any) -> None:
        torch.rand(2, device="cuda")

    with pytest.raises(RunError, match="a kernel of the step draws random numbers from torch's generator"):
        trained(FUSED, True, hooked(draw))


def test_a_step_that_makes_the_cpu_wait_ends_the_run_in_a_sentence() -> None:
    """The last test of this file: torch's generator draws nothing more in a process in which a recording failed."""

    def wait(module: Any, inputs: Any, output: Any) -> None:
        torch.zeros((), device="cuda").item()

    with pytest.raises(RunError, match=r"^the step cannot be recorded as a CUDA graph: .*; set trainer\.graphs=false"):
        trained(FUSED, True, hooked(wait))
    torch.cuda.synchronize()
    assert float(torch.ones(3, device="cuda").sum()) == 3.0, "the GPU still works"
