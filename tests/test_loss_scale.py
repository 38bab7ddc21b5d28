"""fp16 with dynamic loss scaling: its runs are those of fp32 to rounding, and an overflow leaves a step out everywhere.

`pytest --wide precision` compares every layout.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from mplug.errors import Diverged, UsageError
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug_steps import LossScale
from mplug_testing import run_workers
from mplug_testing.harness import logical, tiny_config, tiny_run, train_steps
from mplug_testing.runs import trained
from mplug_testing.waiting import never_waiting

Settings = dict[str, Any]
FP16: Settings = {"trainer.precision": "fp16"}
SCALE = 1024.0
EXPERTS: Settings = {**tiny_models.EXPERTS, "model.ffn_hidden_size": 32, "model.aux_loss_coefficient": 1.0}


def loss_scale(**fields: float) -> Settings:
    return {f"trainer.loss_scale.{name}": value for name, value in fields.items()}


# The scale by itself.


def scale_of(**fields: float) -> LossScale:
    return build(tiny_run({**FP16, **loss_scale(**fields)})).loss_scale


def test_the_scale_falls_with_an_overflow_and_rises_after_many_steps_without() -> None:
    scale, seen, yes, no = (
        scale_of(initial=8, smallest=2, growth_interval=3),
        [],
        torch.tensor(True),
        torch.tensor(False),
    )
    for overflow in (yes, no, no, yes, no, no, no, no, yes, yes, yes):
        scale.update(overflow, no)
        seen.append(float(scale.scale))
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4, 2, 2, 2]
    assert float(scale.overflows) == 5
    assert bool(scale.failed(yes)), "it is the smallest"
    assert not bool(scale.failed(no))
    halted = scale_of(initial=8)
    halted.update(yes, yes)
    assert (float(halted.scale), float(halted.overflows)) == (8, 0), "the scale of a run that is halted stays"


@pytest.mark.parametrize(
    ("name", "value"), [("initial", 1000), ("smallest", 0), ("backoff_factor", 1), ("growth_factor", 0.5)]
)
def test_what_would_round_or_not_converge_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"trainer\.loss_scale\.{name}"):
        tiny_config({**FP16, **loss_scale(**{name: value})})


# Runs.


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 3e-3), ("bf16", 2e-2)])
def test_a_run_in_low_precision_is_that_of_fp32_to_rounding(precision: str, tolerance: float) -> None:
    found, exact = (train_steps({"trainer.precision": one}) for one in (precision, "fp32"))
    assert found.losses == pytest.approx(exact.losses, rel=1e-3)
    assert found.norms == pytest.approx(exact.norms, rel=tolerance)
    assert found.val_loss == pytest.approx(exact.val_loss, rel=1e-3)


def test_losses_inside_of_blocks_are_scaled_like_the_models() -> None:
    def router_gradient(settings: Settings) -> Tensor:
        trace, name = train_steps({**EXPERTS, **settings}), "blocks.1.moe.router.weight"
        return logical([trace.gradients[0]], name, trace.shapes[name])

    exact, found = router_gradient({}), router_gradient({**FP16, **loss_scale(initial=SCALE)}) / SCALE
    assert float((found - exact).norm() / exact.norm()) < 0.05


# Under layouts.


@dataclass
class Scaled:
    """What a rank saw of every step: loss, whether it was skipped, the scale, and a sum of its weights' bits."""

    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)


def stepped(settings: Settings, poisoned_rank: int | None = None, own_only: bool = False) -> Scaled:
    """Be a rank of a run of four steps. In the second, a gradient that only `poisoned_rank` holds is infinite.

    With `own_only`, a planted fault, each rank knows of its own overflows only.
    """
    if own_only:
        norm_of_own_gradients_only()
    run = tiny_run(settings)
    parts, seen = build(run), Scaled()
    for run.step in range(1, 5):
        parts.stepper.forward_backward(parts.train_loader.take(8), run.step)
        if run.step == 2 and run.rank == poisoned_rank:
            piece = next(piece for piece in parts.pieces if piece.name.endswith("attn.out.weight"))
            piece.gradient.flatten()[0] = float("inf")
        result = parts.stepper.update(1e-3, 0.1)
        seen.losses.append(float(result.loss))
        seen.skipped.append(bool(result.skipped))
        seen.scales.append(float(result.figures["loss_scale"]))
        seen.weights.append([piece.master.clone() for piece in parts.pieces])
    return seen


def norm_of_own_gradients_only() -> None:
    original = Run.summed_within_worker

    def summed(run: Run, values: Tensor) -> Tensor:
        total = original(run, values)
        return total if values.dim() == 0 or len(values) != 5 else torch.stack((*total[:2], values[2], *total[3:]))

    Run.summed_within_worker = summed  # type: ignore[method-assign]


LAYOUTS = [("pp2", 2), ("fsdp2", 2)]
MORE = [("tp2", 2), ("dp2", 2), ("cp2", 2), ("tp2pp2", 4), ("dp2tp2", 4), ("zero2", 2), ("zero2pp2", 4)]


@pytest.mark.parametrize(
    ("layout", "ranks"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.wide("precision")) for one in MORE)]
)
@pytest.mark.wide("precision")
def test_a_layout_gives_the_run_and_the_scales_of_one_process(layout: str, ranks: int) -> None:
    settings = {**FP16, **loss_scale(initial=2.0**20, growth_interval=1)}
    alone = stepped(settings)
    assert alone.skipped[0]
    assert len(set(alone.scales)) > 1
    for seen in run_workers(ranks, stepped, {**settings, "parallel.layout": layout}):
        assert seen.scales == alone.scales
        assert seen.skipped == alone.skipped
        assert seen.losses == pytest.approx(alone.losses, rel=1e-3)


def assert_skipped_everywhere(found: list[Scaled]) -> None:
    for seen in found:
        assert seen.skipped == [False, True, False, False]
        assert seen.scales == [SCALE, SCALE, SCALE / 2, SCALE / 2]
        assert all(torch.equal(one, other) for one, other in zip(seen.weights[0], seen.weights[1], strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(seen.weights[1], seen.weights[2], strict=True))


@pytest.mark.parametrize("own_only", [False, True])
@pytest.mark.wide("precision", quick=["False"])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(own_only: bool) -> None:
    settings = {**FP16, **loss_scale(initial=SCALE), "parallel.layout": "tp2"}
    found = run_workers(2, stepped, settings, 1, own_only)
    with pytest.raises(AssertionError) if own_only else nullcontext():
        assert_skipped_everywhere(found)


# What a user sees.


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_the_scale_and_overflows_and_resuming_gives_the_same_bits(
    tmp_path: Path, assert_bitwise: Callable[[Path, Path], None]
) -> None:
    settings = {**FP16, **loss_scale(initial=2.0**17, growth_interval=2), "trainer.eval_every": 0}
    settings |= {"checkpoint.every": 4, "checkpoint.keep": 9}
    whole = trained(tiny_config({**settings, "trainer.steps": 8}), tmp_path / "whole")
    first = trained(tiny_config({**settings, "trainer.steps": 4}), tmp_path / "part")
    trained(tiny_config({**settings, "trainer.steps": 8}), tmp_path / "part", resume_from=first.saved[-1])
    told, resumed = lines(tmp_path / "whole"), lines(tmp_path / "part")
    for name in ("loss", "grad_norm", "loss_scale", "overflows", "skipped"):
        assert [line[name] for line in told] == [line[name] for line in resumed], name
    assert told[0]["skipped"]
    assert told[-1]["overflows"] == sum(line["skipped"] for line in told) < 8
    assert told[1]["loss_scale"] == told[0]["loss_scale"] / 2
    assert any(one["loss_scale"] < other["loss_scale"] for one, other in pairwise(told))
    assert_bitwise(whole.saved[-1], tmp_path / "part" / "checkpoints" / "step_00000008")


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_an_overflow_at_the_smallest_scale_is_what_nonfinite_says(tmp_path: Path, nonfinite: str) -> None:
    settings = {**FP16, **loss_scale(initial=2.0**20, smallest=2.0**20), "trainer.nonfinite": nonfinite}
    config = tiny_config({**settings, "trainer.steps": 2, "trainer.eval_every": 0})
    if nonfinite == "skip":
        trained(config, tmp_path)
        assert [line["skipped"] for line in lines(tmp_path)] == [True, True]
    else:
        with pytest.raises(Diverged, match="at the smallest loss scale"):
            trained(config, tmp_path)


def test_a_run_that_goes_on_in_fp16_begins_with_a_new_scale(tmp_path: Path) -> None:
    common = {"trainer.eval_every": 0, "checkpoint.every": 2}
    first = trained(tiny_config({**common, "trainer.steps": 2}), tmp_path)
    config = tiny_config({**common, **FP16, "trainer.steps": 3})
    trained(config, tmp_path, resume_from=first.saved[-1], allowed=("trainer.precision",))
    assert [line.get("loss_scale") for line in lines(tmp_path)] == [None, None, 4096.0]


@pytest.mark.gpu
def test_a_step_in_fp16_never_waits_for_the_device() -> None:
    run = tiny_run({**FP16, "trainer.device": "cuda", "trainer.compile": "never", "kernels.default": None})
    run.device = "cuda"
    parts = build(run)
    for run.step in (1, 2, 3):
        batches = list(parts.train_loader.take(8))
        with never_waiting() if run.step == 3 else nullcontext():
            parts.stepper.forward_backward(batches, run.step)
            result = parts.stepper.update(1e-3, 0.1)
    assert not bool(result.skipped)
