"""What is told of a step: its figures, read so that the device never waits for the host.

On a GPU that is while the next step runs; a CPU is done with a step when the host is.
"""

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mplug.build import Parts
from mplug.contracts import Record, StepResult
from mplug.errors import Diverged
from mplug.hardware import Moment, peak_memory_gib, peak_tflops
from mplug.position import Position
from mplug.run import Run

SCALARS = 6
"""Figures that every step has."""


class Figures:
    """A step's figures on their way to the host; `over` is the moment at which they are there."""

    def __init__(self, result: StepResult, device: str) -> None:
        failed = result.skipped if result.failed is None else result.failed
        scalars = (result.loss, result.grad_norm, result.tokens, result.skipped, result.stop, failed)
        self._names = tuple(result.figures)
        self._shapes = {name: tuple(value.shape) for name, value in result.statistics.items()}
        rest = result.statistics.values()
        figures = torch.cat([value.double().flatten() for value in (*scalars, *result.figures.values(), *rest)])
        if figures.is_cuda:
            self._host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._host.copy_(figures, non_blocking=True)
        else:
            self._host = figures
        self.over = Moment(device)

    @property
    def known(self) -> bool:
        """Whether reading them waits for nothing, on any rank."""
        return self.over.passed

    def read(self) -> tuple[float, float, float, bool, bool, bool]:
        """(loss, gradient norm, tokens, skipped, stop, failed); waits for the step and for nothing after it."""
        self.over.wait()
        loss, grad_norm, tokens, skipped, stop, failed = self._host[:SCALARS].tolist()
        return loss, grad_norm, tokens, bool(skipped), bool(stop), bool(failed)

    def read_more(self) -> dict[str, float]:
        """Further scalars by name; once `read` has waited."""
        return dict(zip(self._names, self._host[SCALARS : SCALARS + len(self._names)].tolist(), strict=True))

    def read_statistics(self) -> dict[str, Any]:
        """What modules have counted, in numbers and lists, by name; once `read` has waited."""
        parts = self._host[SCALARS + len(self._names) :].split([prod(shape) for shape in self._shapes.values()])
        return {
            name: part.view(shape).tolist() for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }


@dataclass(frozen=True)
class Underway:
    """A step that the device may still be busy with, and what the host knows of it already."""

    step: int
    samples: int
    lr: float
    data_wait_s: float
    figures: Figures


class Report:
    """Tells observers of every step, in order; `stop` once any rank has asked for it."""

    stop = False

    def __init__(self, run: Run, parts: Parts, position: Position) -> None:
        self.run, self.parts, self.position = run, parts, position
        self._underway: Underway | None = None
        self._record: Record | None = None
        self._mark = Moment(run.device)

    def pause(self) -> None:
        """Where no step is under way, the time since the last one (an evaluation, a save) belongs to none."""
        if self._underway is None:
            self._mark = Moment(self.run.device)

    def follow(self, step: Underway) -> None:
        """A step has been launched: tell of the one before it."""
        self.settle()
        self.tell()
        self._underway = step
        if step.figures.known:
            self.settle()

    def settle(self) -> None:
        """Wait for the step under way; Diverged where it is not finite and the run is to stop then."""
        if self._underway is None:
            return
        step, self._underway = self._underway, None
        loss, grad_norm, tokens, skipped, stop, failed = step.figures.read()
        seconds, self._mark = step.figures.over.since(self._mark), step.figures.over
        if failed and self.run.config.trainer.nonfinite == "stop":
            scale = step.figures.read_more().get("loss_scale")
            at = f", at the smallest loss scale ({scale:g})" if scale is not None and math.isfinite(loss) else ""
            raise Diverged(
                f"step {step.step} has a loss of {loss} and a gradient norm of {grad_norm}{at}; no weight was changed "
                f"by it. Resume with a lower optimizer.lr, or look at the data of this step; trainer.nonfinite=skip "
                f"leaves such steps out"
            )
        self.stop = self.stop or stop
        self.position.tokens += int(tokens)
        self._record = {
            "step": step.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": step.lr,
            "tokens": self.position.tokens,
            **self._speed(step.samples, seconds),
            "memory_gib": peak_memory_gib(self.run.device),
            "data_wait_s": step.data_wait_s,
            "skipped": skipped,
            **step.figures.read_more(),
        }
        if statistics := step.figures.read_statistics():
            self._record["statistics"] = statistics

    def tell(self, **more: float) -> None:
        """Tell of the step whose figures are read, if there is one that was not told of, with `more` of it."""
        if self._record is not None:
            if self.run.claim is not None:
                self.run.claim.keep()
            record, self._record = {**self._record, **more}, None
            self.run.hooks.observe("step_finished", run=self.run, record=record)

    def _speed(self, samples: int, seconds: float) -> Record:
        length, world_size = self.run.config.trainer.seq_length, self.run.mesh.world_size
        flops = self.parts.model.flops.of(samples * length, samples * length**2)
        tflops, peak = flops / seconds / 1e12 / world_size, peak_tflops(self.run.device)
        return {"tokens_per_s": samples * length / seconds, "tflops": tflops, "mfu": tflops / peak if peak else None}
