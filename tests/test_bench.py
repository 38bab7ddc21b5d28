"""mplug bench: everyone measured in turn, figures that follow from the times, and where the time goes."""

import importlib
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from mplug_bench import command, measure
from mplug_bench.ceilings import attentions, products
from mplug_bench.measure import Measured, Opponent, Task, bench_settings, checked, facts_of
from mplug_bench.profiling import CLASSES, PRECEDENCE, RECORDED, Event, by_class, class_of, profile_of
from mplug_bench.script import Script, task_of
from torch import Tensor

from mplug import RunError, UsageError
from mplug.config.sources import merge, read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.launching import Stopped
from mplug.run.prepare import prepare
from mplug.training.assembly import build, build_loader
from mplug.training.loop import launch_step

Cli = Callable[..., subprocess.CompletedProcess[str]]
YARDSTICK = Path(__file__).parent.parent / "benchmarks" / "yardstick.py"
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


GEMM, FLASH, NCCL, COPY = "nvjet_one", "flash_fwd", "ncclDevKernel_AllReduce", "Memcpy DtoD"


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


# What a model asks of the machine.

SMALL = {"model.num_layers": 2, "model.hidden_size": 32, "model.num_attention_heads": 2, "trainer.seq_length": 32}


def small(**changes: Any) -> list[str]:
    return [f"{name}={value}" for name, value in {**SMALL, **changes}.items()]


@pytest.mark.parametrize(("layout", "share"), [("", 1), ("tp2", 2), ("dp2", 2)])
def test_the_products_and_attentions_of_a_rank_have_its_share_of_the_models_flops(layout: str, share: int) -> None:
    words = small(**{"parallel.layout": layout, "trainer.micro_batch_size": 2, "model.activation": "swiglu"})
    run, model = checked(read_assignments(words))
    facts, samples = facts_of(run, model), run.config.trainer.global_batch_size
    attention = facts.flops_full - facts.flops
    assert attention == model.plan.flops.of(0, samples * 32**2)
    assert share * sum(work.flops * work.calls for work in products(run, model)) == facts.flops - attention
    assert 6 * share * sum(work.flops * work.calls for work in attentions(run, model)) == 7 * attention


# The yardstick.


@pytest.fixture(scope="session")
def yardstick() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(YARDSTICK.parent)
        return importlib.import_module("yardstick")


OPTIONS = [
    {},
    {"model.position": "learned"},
    {"model.qk_norm": False},
    {"model.activation": "gelu_tanh"},
    {"model.activation": "swiglu", "model.hidden_size": 96},
    {"model.norm": "rmsnorm", "model.bias": True},
    {"model.norm": "layernorm", "model.bias": True},
    {"model.tie_embeddings": True},
    {"model.num_attention_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16},
    {"model.ffn_hidden_size": 40, "trainer.micro_batch_size": 2},
]


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_the_yardstick_counts_the_parameters_and_flops_of_a_gpt(yardstick: ModuleType, changes: dict[str, Any]) -> None:
    run, model = checked(read_assignments(small(**changes)))
    task, facts = task_of(run, model), facts_of(run, model)
    assert yardstick.count(task, yardstick.shape_of(task)) == {"parameters": facts.parameters, "flops": facts.flops}


def same_name(name: str) -> str:
    """The name in the yardstick of a parameter of ours."""
    return re.sub(r"\.(attn|mlp)\.", ".", re.sub(r"\.attn\.([qk]_norm)", r".\1.weight", name))


STEPS = [
    *(pytest.param(one, "fp32", 2e-5, id=f"{one}") for one in [*OPTIONS, {"trainer.max_grad_norm": 0.05}]),
    pytest.param({}, "bf16", 5e-3, id="bf16"),
    *(pytest.param(one, "bf16", 5e-3, marks=pytest.mark.wide("compile"), id=f"bf16 {one}") for one in OPTIONS[1:]),
]


@pytest.mark.parametrize(("changes", "precision", "band"), STEPS)
def test_the_yardstick_takes_the_steps_that_mplug_takes(
    yardstick: ModuleType, changes: dict[str, Any], precision: str, band: float
) -> None:
    words = small(**changes, **{"trainer.precision": precision, "trainer.device": "cpu", "optimizer.lr": 0.01})
    run = prepare(resolve(Registry(), bench_settings(), read_assignments(words)))
    parts = build(run)
    task = task_of(run, parts.model)
    shape = yardstick.shape_of(task)
    model = yardstick.GPT(shape, task["seq_length"], task["attention"])
    ours = {same_name(piece.name): piece.master for piece in parts.pieces}
    theirs = dict(model.named_parameters())
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name].view_as(parameter))
    trainer = yardstick.Trainer(model, task)
    batches = build_loader(run, "train").take(4 * 8)
    windows = torch.stack([torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1) for batch in batches])
    for window in windows.unflatten(0, (4, task["micro_batches"])):
        run.step += 1
        result, _ = launch_step(run, parts, 8, run.config.optimizer.lr, run.config.optimizer.weight_decay)
        own = band / 10 if run.step == 1 else band  # AdamW's first steps are signs, those of tiny gradients rounding
        assert trainer.step(window).item() == pytest.approx(result.loss.item(), rel=own)


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize(
    "changes",
    [{}, OPTIONS[1] | OPTIONS[4] | OPTIONS[5]],
    ids=["default", "other"],
)
@pytest.mark.wide("compile")
def test_every_unit_of_the_yardstick_compiles_whole_and_gives_the_same_losses(
    yardstick: ModuleType, changes: dict[str, Any]
) -> None:
    torch.compiler.reset()
    words = {**changes, "trainer.micro_batch_size": 4, "trainer.precision": "bf16", "trainer.device": "cpu"}
    task = {**task_of(*checked(read_assignments(small(**words)))), "warmup": 0, "steps": 2, "profile": 0}
    losses = [
        yardstick.measure({**task, "compile": backend}, yardstick.shape_of(task))["losses"]
        for backend in ("never", "aot_eager")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][1]


@pytest.mark.wide("compile")
def test_flash_attention_is_an_operator_that_compiles_whole(
    yardstick: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert causal
        assert return_lse
        scores = weights(q, k)
        return torch.einsum("bhst,bthk->bshk", scores.softmax(-1), v), scores.logsumexp(-1)

    def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, causal: bool) -> Any:
        assert causal
        kept = (weights(q, k) - lse[..., None]).exp()
        inner = torch.einsum("bshk,bshk->bhs", grad, out)
        scores = kept * (torch.einsum("bshk,bthk->bhst", grad, v) - inner[..., None]) * q.shape[-1] ** -0.5
        of_q, of_k = torch.einsum("bhst,bthk->bshk", scores, k), torch.einsum("bhst,bshk->bthk", scores, q)
        return of_q, of_k, torch.einsum("bhst,bshk->bthk", kept, grad)

    interface = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name, module in {"": SimpleNamespace(), ".cute": SimpleNamespace(), ".cute.interface": interface}.items():
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", module)
    yardstick.define_flash()
    of = partial(torch.randn, 2, 8, 3, 4)
    q, k, v, grad = of(requires_grad=True), of(requires_grad=True), of(requires_grad=True), of()
    compiled = torch.compile(yardstick.flash, backend="aot_eager", fullgraph=True)
    for attend in (yardstick.flash, compiled):
        found, expected = attend(q, k, v), yardstick.sdpa(q, k, v)
        torch.testing.assert_close(found, expected)
        pairs = [torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)]
        torch.testing.assert_close(*pairs)


def test_the_yardstick_says_what_it_does_not_know(yardstick: ModuleType) -> None:
    def task(**changes: Any) -> dict[str, Any]:
        return task_of(*checked(read_assignments(small(**changes))))

    backend = task(**{"kernels.sdpa.backend": "math"})
    for asked, words in (
        (task(**{"kernels.attention": "reference"}), "attention 'reference', only 'sdpa', 'flash'"),
        (task(**{"trainer.deterministic": "true"}), "deterministic True, only False"),
        (task(**{"model.dropout": 0.5}), "dropout 0.5, only 0"),
        ({**backend, "attention_by": "other"}, "attention_by 'other', only 'cuDNN', \"torch's choice\", "),
    ):
        with pytest.raises(SystemExit, match=f"^this script does not support {words}"):
            yardstick.shape_of(asked)
    with yardstick.backends_of(backend):
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()


# A script that takes part.


COUNTING = """
import json, sys
told = json.load(sys.stdin)
print("about to answer")
print(json.dumps({"parameters": 41184, "flops": 53477376 * told["seq_length"] // 32}))
"""
"""A script that counts as the small model does, and attention as if it were linear."""


@pytest.mark.parametrize(
    ("words", "variants", "sentence"),
    [
        (
            "",
            {"same": "model.init_std=0.1", "larger": "model.ffn_hidden_size=160"},
            "41,184 parameters, .*larger.*45,280",
        ),
        ("", {"longer": "trainer.seq_length=64"}, "one.py' reports 53,477,376 flops, and 'longer' has 113,246,208"),
        ("", {"same": "", "wide": "parallel.layout=dp2"}, "of one process, and 'wide' needs 2; remove --against"),
        ("parallel.layout=dp2", {}, "of one process, and '.*one.py' needs 2; remove --against"),
        ("trainer.stpes=1", {}, r"trainer.stpes \(--against\): unknown field; did you mean 'steps'"),
    ],
)
def test_a_script_is_not_compared_with_a_run_that_computes_something_else(
    tmp_path: Path, words: str, variants: dict[str, str], sentence: str
) -> None:
    (tmp_path / "one.py").write_text(COUNTING)
    script, base = f"{tmp_path / 'one.py'} ", read_assignments(small())
    assert Opponent.of(Script.read(f"{script} trainer.seq_length=64"), base, {}).task["seq_length"] == 64
    facts = {name: facts_of(*checked(merge(base, read_assignments(v.split())))) for name, v in variants.items()}
    with pytest.raises(UsageError, match=sentence):
        Opponent.of(Script.read(script + words), base, facts)


def written(folder: Path, source: str) -> Script:
    (folder / "one.py").write_text(source)
    return Script.read(str(folder / "one.py"))


COUNTS = "must end with a line of JSON with the keys parameters and flops"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import sys\nprint('{}')\nsys.exit('first\\nno room here')", "ended with status 1: no room here"),
        ("print('{}'); print('ready')", f"{COUNTS}; it ended with: ready"),
        ("print('{\"parameters\": 1}')", COUNTS),
        ("pass", "it ended with: nothing"),
    ],
)
def test_a_script_that_fails_or_answers_wrong_ends_the_measurement_with_a_sentence(
    tmp_path: Path, source: str, sentence: str
) -> None:
    with pytest.raises(RunError, match=sentence):
        written(tmp_path, source).ask({})


def test_a_script_that_forgets_its_times_is_told_so(tmp_path: Path) -> None:
    script = written(tmp_path, """print('{"parameters": 1, "flops": 2}')""")
    assert script.ask({}) == {"parameters": 1, "flops": 2}
    with pytest.raises(RunError, match="a line of JSON with the keys parameters, flops, seconds and memory_gib"):
        script.ask({}, steps=1)


def test_the_kernels_that_a_script_has_recorded_are_classed(tmp_path: Path) -> None:
    events = [[GEMM, float(n), n + 0.75] for n in range(RECORDED)]
    answer = {"parameters": 1, "flops": 2, "seconds": [1.0], "memory_gib": 3.0, "events": events}
    opponent = Opponent(
        written(tmp_path, f"print({json.dumps(answer)!r})"), {}, facts_of(*checked(read_assignments(small())))
    )
    found = opponent.turn(Task({}, 1, 1, profile=True), 989.4)
    assert found.profile is not None
    assert found.profile.classes == pytest.approx({"GEMM": 0.75, "gaps": 0.5 / 3})
    assert (found.rounds, found.memory_gib, found.peak_tflops) == ([[1.0]], 3.0, 989.4)


def test_a_stop_ends_the_script_too(tmp_path: Path) -> None:
    stopping = "import os, signal, sys\nos.kill(os.getppid(), signal.SIGTERM)\nsys.stdin.read()\nsignal.pause()"
    with pytest.raises(Stopped) as stopped:
        written(tmp_path, stopping).ask({})
    assert stopped.value.signal == signal.SIGTERM


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


@pytest.mark.wide("compile")
def test_the_yardstick_takes_turns_with_the_variants(cli: Cli, tmp_path: Path) -> None:
    words = [word for value in small() for word in ("--set", value)]
    counts = ("--steps", "2", "--warmup", "1", "--rounds", "2", "--out", "bench.json")
    result = cli("bench", *words, "--against", f"{YARDSTICK} trainer.seed=3", *counts)
    assert result.returncode == 0, result.stderr
    told = [line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("round ")]
    assert told == ["unchanged", "yardstick.py"] * 2
    header, *rows = result.stdout.splitlines()
    assert header.split("  ")[-1].strip() == "TO yardstick.py"
    assert [row.split("  ")[0].strip() for row in rows] == ["unchanged", "yardstick.py"]
    assert rows[-1].endswith("1.000 (1.000 to 1.000)")
    kept = json.loads((tmp_path / "bench.json").read_text())
    ours, theirs = kept["variants"][""], kept["against"]
    assert (ours["flops"], ours["parameters"]) == (theirs["flops"], theirs["parameters"])
    rounds = zip(ours["rounds"], theirs["rounds"], strict=True)
    ratios = [statistics.median(other) / statistics.median(own) for own, other in rounds]
    assert ours["ratios_against"] == pytest.approx(ratios)
    assert f"{min(ratios):.3f} to {max(ratios):.3f}" in rows[0]
