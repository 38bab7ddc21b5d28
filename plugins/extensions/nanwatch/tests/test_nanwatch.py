"""The origin of values that are not finite, in real runs under several layouts, and the words for each cause."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch
from layout_words import COMPILING
from mplug_nanwatch.finding import Check, RankReport, sentence

from mplug import hookimpl
from mplug.errors import Diverged, UsageError
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import as_rank, tiny_config
from mplug_testing.workers import run_workers

HERE = gethostname()
CLEAN = RankReport(0, "a", None, ((1, 2), (3, 4)), (), (), ())


class TestNanWatch(ExtensionSuite):
    plugin = "nanwatch"
    settings = {"extensions.nanwatch.gradients": True}
    without_effect = {"gradients": "it decides which rank an error names, and no run of the suite has this error"}


def test_the_first_tensor_in_the_flow_of_data_is_named() -> None:
    checks = (
        Check(1, 3, "blocks.2", "its output 'hidden'", (0,)),
        Check(1, 2, "blocks.1", "its output 'hidden'", (1,)),
    )
    found = sentence([CLEAN, RankReport(1, "b", 3, ((5, 6), (7, 8)), (), (), checks)])
    assert found.startswith(
        "unit 'blocks.1' is the first one with a value that is not finite, in its output 'hidden', "
    )
    assert "on rank 1 on b, and only for sample 8 of 8: look at the data" in found


def test_a_transient_fault_is_at_the_rank_whose_sum_comes_first_in_the_flow_of_data() -> None:
    ranks = [RankReport(rank, "a", place, ((1, 2),), (), (), ()) for rank, place in enumerate((9, 5, None, 5))]
    assert sentence(ranks).startswith("a transient fault of rank 1 on a and rank 3 on a: the same passes")
    assert "of a rank that the sums of the step do not show" in sentence([CLEAN, CLEAN])


def test_a_bad_entry_and_a_bad_weight_are_named_before_their_consequences() -> None:
    check = (Check(0, 0, "embed", "its output 'hidden'"),)
    entry = RankReport(1, "b", 3, ((5, 6),), ("the entry 'pixels' of sample 6",), (), check)
    assert sentence([CLEAN, entry]) == "bad data: the entry 'pixels' of sample 6 is not finite"
    weight = RankReport(1, "b", 3, ((5, 6),), (), ("norm.weight",), check)
    assert sentence([CLEAN, weight]).startswith("the weight 'norm.weight' of rank 1 on b is not finite: other ranks")
    both = sentence([RankReport(0, "a", 3, ((1, 2),), (), ("norm.weight",), check), weight])
    assert "of rank 0 on a and rank 1 on b is not finite: all ranks hold such weights" in both


@pytest.mark.parametrize("setting", ["trainer.nonfinite=skip", "trainer.graphs=True"])
def test_runs_whose_steps_cannot_be_repeated_are_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    with pytest.raises(UsageError, match=rf"extensions\.nanwatch.*{name}"):
        prepare(tiny_config({"extensions.nanwatch": {}, name: {"True": True}.get(value, value)}))


class Fault:
    """Makes values of one unit on one rank not finite: once ('transient'), always, for one sample, or in a weight."""

    def __init__(self, kind: str, rank: int, unit: str = "blocks.1") -> None:
        self.kind, self.rank, self.unit, self.left = kind, rank, unit, 1

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> None:
        self.model = model
        run_all = model.run

        def with_samples(batch: Mapping[str, Any], *chunk: int) -> Any:
            self.samples = batch["sample_ids"].tolist()
            return run_all(batch, *chunk)

        model.run = with_samples
        for unit in model.own_units:
            if unit.name == self.unit and self.kind not in ("weight", "gradient"):
                part = model.module.get_submodule(unit.name)
                setattr(part, unit.method, partial(self.broken, run, getattr(part, unit.method)))

    @hookimpl
    def run_started(self, run: Any) -> None:
        """Strike before the sums of the gradients, which another rank reads."""
        if self.kind == "gradient" and run.rank == self.rank:
            next(iter(self.model.sinks.values())).listeners.insert(0, partial(self.overflow, run))

    def overflow(self, run: Any, sink: Any) -> None:
        if run.step == 2 and self.left:
            self.left -= 1
            sink.buffer.view(-1)[0] = torch.finfo(sink.buffer.dtype).max / 2  # its square overflows

    @hookimpl
    def step_started(self, run: Any) -> None:
        if self.kind == "weight" and run.step == 2 and run.rank == self.rank:
            weight = next(iter(self.model.parameters().values()))
            weight.data.view(-1)[0] = float("nan")

    def broken(self, run: Any, inner: Callable[..., Any], *inputs: Any, **optional: Any) -> Any:
        outputs = inner(*inputs, **optional)
        if run.step < 2 or not torch.is_grad_enabled():
            return outputs
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if self.kind == "transient":
            if run.rank != self.rank or not self.left:
                return outputs
            self.left -= 1
            factor: Any = float("inf")
        elif self.kind == "backward":
            return _change(outputs, _InfiniteGradient.apply(hidden))
        elif self.kind == "sample":
            bad = torch.tensor([sample == 13 for sample in self.samples])
            factor = torch.where(bad, float("nan"), 1.0).to(hidden).view(-1, *[1] * (hidden.dim() - 1))
        else:
            factor = float("nan")
        return _change(outputs, hidden * factor)


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / 0.0


def _change(outputs: Any, first: torch.Tensor) -> Any:
    return (first, *outputs[1:]) if isinstance(outputs, tuple) else first


def broken_run(settings: Mapping[str, Any], fault: Fault, directory: str, device: str = "cpu") -> str:
    own = {
        "extensions.nanwatch.gradients": True,
        "trainer.steps": 4,
        "checkpoint.every": 0,
        "trainer.nonfinite": "stop",
    }
    run = as_rank(prepare(tiny_config({**own, **settings}), {f"{HOST}fault": fault}, Path(directory)))
    run.device = device
    try:
        train(run)
    except Diverged as error:
        return str(error)
    return ""


LAYOUTS = {
    "dp4": {},
    "tp2dp2": {},
    "pp2dp2": {},
    "cp2dp2": {},
    "fsdp4": {},
    "zero2tp2": {},
    "ep2dp4": {"model.num_experts": 4, "model.num_experts_per_token": 2},
}
CASES = [
    pytest.param("dp4", "transient", "a transient fault of rank 2 on", marks=pytest.mark.wide("layouts")),
    pytest.param("dp4", "sample", "only for sample 13 of", marks=pytest.mark.wide("layouts")),
    ("tp2dp2", "program", "in its output 'hidden', on rank 0 on"),
    (
        "pp2dp2",
        "backward",
        "unit 'blocks.1' is the first one with a value that is not finite, in the gradient of its input",
    ),
    pytest.param("pp2dp2", "transient", "a transient fault of rank 2 on", marks=pytest.mark.wide("layouts")),
    ("fsdp4", "transient", "a transient fault of rank 2 on"),
    ("cp2dp2", "sample", "only for sample 13 of"),
    ("zero2tp2", "program", "for all"),
    ("dp4", "weight", "of rank 2 on"),
    ("dp4", "gradient", "a transient fault of rank 2 on"),
]


@pytest.mark.wide("layouts", quick=["dp4-weight-of rank 2 on", "tp2dp2-program-in its output 'hidden', on rank 0 on"])
@pytest.mark.parametrize(("layout", "kind", "words"), CASES)
def test_the_origin_is_named_under_a_layout(layout: str, kind: str, words: str, tmp_path: Path) -> None:
    settings = {"parallel.layout": layout, **LAYOUTS[layout]}
    unit = (
        "blocks.2" if (layout, kind) == ("pp2dp2", "transient") else "blocks.1"
    )  # of the second stage, which has rank 2
    errors = run_workers(4, broken_run, settings, Fault(kind, 2, unit), str(tmp_path))
    assert len(set(errors)) == 1
    assert errors[0].startswith("step 2 has a loss of")
    assert words in errors[0], errors[0]
    if kind in ("program", "backward", "sample"):
        assert "unit 'blocks.1' is the first one" in errors[0]


@pytest.mark.wide("compile")
@COMPILING
@pytest.mark.parametrize("kind", ["transient", "program", "sample", "backward"])
def test_the_origin_is_named_in_a_compiled_run_with_recomputation(kind: str, tmp_path: Path) -> None:
    settings = {"trainer.compile": "aot_eager", "memory.recompute.mode": "full"}
    error = broken_run(settings, Fault(kind, 0), str(tmp_path))
    assert ("a transient fault" if kind == "transient" else "unit 'blocks.1' is the first one") in error


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("kind", ["transient", "program", "sample", "backward", "gradient"])
def test_the_origin_is_named_although_the_gpu_has_run_the_next_step(kind: str, tmp_path: Path) -> None:
    settings = {"trainer.device": "cuda", "trainer.compile": "auto" if kind == "program" else "never"}
    error = broken_run(settings, Fault(kind, 0), str(tmp_path), "cuda")
    transient = kind in ("transient", "gradient")
    assert ("a transient fault" if transient else "unit 'blocks.1' is the first one") in error
