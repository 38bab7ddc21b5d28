"""mplug bench: every variant measured in turn, figures that follow from the times, and where the time goes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mplug.bench import Measured
from mplug.profiling import CLASSES, class_of

Cli = Callable[..., subprocess.CompletedProcess[str]]


def measured(**changes: object) -> Measured:
    facts = {
        "tokens": 4000,
        "flops": 6 * 10**12,
        "flops_full": 9 * 10**12,
        "world_size": 2,
        "parameters": 10,
        "device": "cuda",
        "peak_tflops": 30.0,
        "memory_gib": 1.0,
        "seconds": [0.5, 0.1, 0.2],
    }
    return Measured(**{**facts, **changes})


def test_figures_are_those_of_the_median_step_and_of_one_gpu() -> None:
    one = measured()
    assert one.step == 0.2
    assert one.tokens_per_s == 10000.0
    assert one.tflops(one.flops) == pytest.approx(15.0)
    assert one.tflops(one.flops_full) == pytest.approx(22.5)
    assert one.mfu == pytest.approx(0.5)
    assert measured(peak_tflops=None).mfu is None
    both = one.joined(measured(seconds=[0.4, 0.6], memory_gib=3.0))
    assert both.step == 0.4
    assert both.memory_gib == 3.0


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizer", "optimizer"),
        ("triton_red_fused__log_softmax__to_copy__unsafe_view_1", "loss"),
        ("triton_poi_fused__unsafe_view_gelu_4", "norm and activation"),
        ("Memcpy HtoD (Pageable -> Device)", "copies and fills"),
        ("aten::mm", "GEMM"),
        ("a_kernel_of_nobody", "other"),
    ],
)
def test_a_kernel_is_classed_by_its_name(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind
    assert kind in (*CLASSES, "other")


SMALL = {"model.num_layers": 2, "model.hidden_size": 32, "model.num_attention_heads": 2, "trainer.seq_length": 32}


def test_variants_take_turns_and_all_figures_are_kept(cli: Cli, tmp_path: Path) -> None:
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    variants = ("--variant", "model.num_layers=1", "--variant", "parallel.layout=dp2")
    words = ("--steps", "2", "--warmup", "1", "--rounds", "2", "--profile", "--limits", "--out", "bench.json")
    result = cli("bench", *small, *variants, *words)
    assert result.returncode == 0, result.stderr
    told = [line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("round ")]
    assert told == ["model.num_layers=1", "parallel.layout=dp2"] * 2
    assert "TOKENS/s/GPU" in result.stdout
    assert "GEMM" in result.stdout
    kept = json.loads((tmp_path / "bench.json").read_text())
    one, two = kept["variants"]["model.num_layers=1"], kept["variants"]["parallel.layout=dp2"]
    assert (len(one["seconds"]), one["world_size"], two["world_size"]) == (4, 1, 2)
    assert one["tokens"] == two["tokens"] == 8 * 32
    assert one["flops"] < two["flops"]
    assert one["flops_full"] - one["flops"] == 8 * 32**2 * 6 * 32
    assert all(value > 0 for value in kept["limits"].values())
    assert not (tmp_path / "runs").exists()


def test_a_variant_that_is_wrong_is_refused_before_anything_is_measured(cli: Cli) -> None:
    result = cli("bench", "--variant", "", "--variant", "trainer.stpes=1")
    assert result.returncode == 2
    assert "trainer.stpes (--variant): unknown field; did you mean 'steps'?" in result.stderr
    assert "round" not in result.stderr
