"""mplug bench: everyone measured in turn, figures that follow from the times, and where the time goes."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benches import COPY, FLASH, GEMM, NCCL, small
from click.testing import CliRunner
from command_line import Cli
from mplug_bench import command, measure
from mplug_bench.ceilings import attentions, products
from mplug_bench.measure import Measured, checked, facts_of
from mplug_bench.profiling import CLASSES, PRECEDENCE, Event, by_class, class_of, profile_of

from mplug import UsageError
from mplug.config.sources import read_assignments

FACTS = {"tokens": 4000, "flops": 6 * 10**12, "flops_full": 9 * 10**12, "world_size": 2, "parameters": 10}


def measured(**changes: Any) -> Measured:
    facts = {**FACTS, "device": "cuda", "peak_tflops": 30.0, "memory_gib": 1.0, "rounds": [[0.5, 0.1, 0.2]]}
    return Measured(**{**facts, **changes})


def test_figures_are_those_of_the_median_step_and_of_one_gpu() -> None:
    one = measured()
    assert (one.step, one.tokens_per_s) == (0.2, 10000.0)
    assert one.tflops(one.flops) == pytest.approx(15.0)
    assert one.tflops(one.flops_full) == pytest.approx(22.5)
    assert one.mfu == pytest.approx(0.5)
    assert measured(peak_tflops=None).mfu is None
    both = one.joined(measured(rounds=[[0.4, 0.6]], memory_gib=3.0))
    assert both.rounds == [[0.5, 0.1, 0.2], [0.4, 0.6]]
    assert (both.step, both.memory_gib) == (0.4, 3.0)


def test_figures_of_the_stepper_have_a_column() -> None:
    found = measure._mean(
        [measure._medians([{"bubble": one} for one in own]) for own in ([0.1, 0.2, 0.9], [0.4])] + [{}]
    )
    assert found == {"bubble": pytest.approx(0.3)}
    printed = importlib.import_module("mplug_bench.command")._rows(
        {"": measured(), "pp2": measured(figures=found)}, None
    )
    header, *rows = printed.splitlines()
    assert header.endswith("BUBBLE")
    assert [row.split()[-1] for row in rows] == ["-", "0.300"]


def test_ratios_are_of_each_round_with_its_own_round_of_the_other() -> None:
    one, other = measured(rounds=[[1.0, 9.0, 1.0], [2.0], [5.0]]), measured(rounds=[[2.0], [1.0]], world_size=1)
    assert one.ratios(other) == [1.0, 0.25]
    assert other.ratios(one) == [1.0, 4.0]
    assert one.ratios(one) == [1.0, 1.0, 1.0]


# Where the time goes.


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>", "GEMM"),
        ("triton_tem_fused_addmm_gelu_3", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention"),
        ("void cudnn::fusion::compute_dot_do_o<true, 128>", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_0", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "scan"),
        ("causal_conv1d_bwd_kernel", "scan"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>", "copies and fills"),
        ("adamw_kernel", "optimizer"),
        ("triton_red_fused__log_softmax__to_copy__unsafe_view_1", "loss"),
        ("triton_poi_fused__log_softmax_backward_data_nll_loss_backward_3", "loss"),
        ("triton_poi_fused_add_gelu_linear_4", "norm and activation"),
        ("triton_red_fused__fused_rms_norm__to_copy_add_mm_2", "norm and activation"),
        ("triton_poi_fused_cat__scaled_dot_product_cudnn_attention_backward_6", "copies and fills"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(Iterator&)>", "copies and fills"),
        ("Memcpy HtoD (Pageable -> Device)", "copies and fills"),
        ("Memcpy PtoP (Device -> Device)", "collectives"),
        ("mplug::send_rows", "collectives"),
        ("void cutlass::device_kernel<cutlass::gemm::GemmUniversal<GroupProblemShape<Shape<int, int, int>>>>", "GEMM"),
        ("mplug::grouped_product", "GEMM"),
        ("void cub::DeviceRadixSortOnesweepKernel<DeviceRadixSortPolicy<long, long>>", "sort and gather"),
        ("void at::native::vectorized_gather_kernel<16, long>", "sort and gather"),
        ("triton_poi_fused_index_select_mul_sum_where_4", "sort and gather"),
        ("triton_poi_fused_slice_scatter_zeros_2", "copies and fills"),
        ("triton_poi_fused_gather_silu_2", "norm and activation"),
        ("mplug::meet", "sort and gather"),
        ("aten::_fused_adamw_", "optimizer"),
        ("triton_poi_fused_embedding_dense_backward_1", "other"),
        ("a_kernel_of_nobody", "other"),
    ],
)
def test_a_kernel_is_classed_by_its_name(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind
    assert kind in PRECEDENCE
    assert set(PRECEDENCE) == {*CLASSES, "other"}


def test_classes_and_gaps_add_up_and_what_a_collective_hides_behind_a_product_is_not_counted_twice() -> None:
    events = [Event(GEMM, 1.0, 4.0), Event(FLASH, 4.0, 5.0), Event(GEMM, 7.0, 8.0), Event(COPY, 8.5, 9.0)]
    assert by_class(events) == {"GEMM": 4.0, "attention": 1.0, "copies and fills": 0.5, "gaps": 2.5}
    assert by_class([]) == {"gaps": 0.0}
    events = [Event(NCCL, 0.0, 4.0), Event(GEMM, 1.0, 3.0), Event(NCCL, 2.0, 5.0), Event(COPY, 4.5, 5.5)]
    assert by_class(events) == {"collectives": 2.5, "GEMM": 2.0, "copies and fills": 1.0, "gaps": 0.0}
    profile = profile_of(events, steps=1)
    assert (profile.collectives, profile.step) == (5.0, 5.5), "two collectives at once are one time"


def test_a_profile_is_of_the_steps_after_the_head_start() -> None:
    step = [(GEMM, 0.0, 2.0), (FLASH, 2.0, 2.5), (GEMM, 2.5, 3.5)]
    before = [Event(COPY, 0.0, 1.0), Event("at::cuda::spin_kernel(long)", 1.0, 40.0)]
    steady = [Event(name, 40 + 4 * n + start, 40 + 4 * n + end) for n in range(3) for name, start, end in step]
    profile = profile_of([*reversed(steady), Event("Context Sync", 0.0, 99.0), *before], steps=3)
    assert profile.classes == pytest.approx({"GEMM": 3.0, "attention": 0.5, "gaps": 1.0 / 3})
    assert [(one.name, one.kind, one.seconds, one.calls) for one in profile.longest] == [
        (GEMM, "GEMM", 3.0, 2.0),
        (FLASH, "attention", 0.5, 1.0),
    ]


@pytest.mark.parametrize(("layout", "share"), [("", 1), ("tp2", 2), ("dp2", 2)])
def test_the_products_and_attentions_of_a_rank_have_its_share_of_the_models_flops(layout: str, share: int) -> None:
    words = small(**{"parallel.layout": layout, "trainer.micro_batch_size": 2, "model.activation": "swiglu"})
    run, model = checked(read_assignments(words))
    facts, samples = facts_of(run, model), run.config.trainer.global_batch_size
    attention = facts.flops_full - facts.flops
    assert attention == model.plan.flops.of(0, samples * 32**2)
    assert share * sum(work.flops * work.calls for work in products(run, model)) == facts.flops - attention
    assert 6 * share * sum(work.flops * work.calls for work in attentions(run, model)) == 7 * attention


# The command.


@pytest.mark.wide("compile")
def test_everyone_takes_turns_and_all_figures_are_kept(cli: Cli, tmp_path: Path) -> None:
    words = [word for value in small() for word in ("--set", value)]
    variants = ("--variant", "model.num_layers=1", "--variant", "parallel.layout=dp2")
    counts = ("--steps", "2", "--warmup", "1", "--rounds", "2", "--profile", "--limits", "--out", "bench.json")
    result = cli("bench", *words, *variants, *counts)
    assert result.returncode == 0, result.stderr
    told = [line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith(("round ", "limits: "))]
    assert told == ["model.num_layers=1", "parallel.layout=dp2"] * 3
    assert "TOKENS/s/GPU" in result.stdout
    assert "GEMM" in result.stdout
    kept = json.loads((tmp_path / "bench.json").read_text())
    one, two = kept["variants"]["model.num_layers=1"], kept["variants"]["parallel.layout=dp2"]
    assert (list(map(len, one["rounds"])), one["world_size"], two["world_size"]) == ([2, 2], 1, 2)
    assert one["tokens"] == two["tokens"] == 8 * 32
    assert one["flops"] < two["flops"]
    assert one["flops_full"] - one["flops"] == 8 * 32**2 * 6 * 32
    assert one["limits"]["classes"].keys() == {"GEMM", "attention", "optimizer"}
    own, other = one["limits"]["rates"], two["limits"]["rates"]
    assert other.keys() - own.keys() == {"all-reduce of 1 MiB, bus GB/s", "all-gather of 1 MiB, bus GB/s"}
    assert "float32 product of 128 x 128 matrices, TFLOP/s" in own.keys() - other.keys(), "the machine's once"
    assert all(value > 0 for variant in (one, two) for kind in variant["limits"].values() for value in kind.values())
    assert one["profile"]["classes"]["GEMM"] > 0
    assert len(one["profile"]["longest"]) == 30
    assert not (tmp_path / "runs").exists()


def test_a_bench_without_steps_measures_limits_or_is_refused() -> None:
    for words, message in (
        (("--steps", "0"), "--steps 0 measures no step; add --limits"),
        (("--steps", "0", "--limits", "--profile"), "--against and --profile have no effect"),
    ):
        result = CliRunner().invoke(command, words)
        assert isinstance(result.exception, UsageError)
        assert message in str(result.exception)
