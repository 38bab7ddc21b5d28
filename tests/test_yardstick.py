"""The yardstick of `mplug bench`, and scripts of other trainers: they compute what mplug computes."""

import importlib
import json
import re
import signal
import statistics
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benches import GEMM, small
from command_line import Cli
from mplug_bench.measure import Opponent, Task, bench_settings, checked, facts_of
from mplug_bench.profiling import RECORDED
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

YARDSTICK = Path(__file__).parent.parent / "benchmarks" / "yardstick.py"


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
