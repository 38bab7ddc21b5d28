"""Report the figures of each step to observers, without making the device wait for the CPU.

On a GPU, the figures of a step are read while the next step runs. On a CPU, a step is complete when its call returns.
"""

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mplug.contracts import Record, StepResult
from mplug.errors import Diverged
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug.training.hardware import Moment, peak_memory_gib, peak_tflops
from mplug.training.position import Position

SCALARS = 6
"""Number of figures that every step has."""


class Figures:
    """A step's figures during their copy to CPU memory; the copy is complete at the moment `copied`."""

    def __init__(self, result: StepResult, device: str) -> None:
        failed = result.skipped if result.failed is None else result.failed
        scalars = (result.loss, result.grad_norm, result.tokens, result.skipped, result.stop, failed)
        self._names, self._measured = tuple(result.figures), result.measured
        self._shapes = {name: tuple(value.shape) for name, value in result.statistics.items()}
        tensors = (*scalars, *result.figures.values(), *result.statistics.values())
        figures = torch.cat([tensor.double().flatten() for tensor in tensors])
        if figures.is_cuda:
            self._values = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._values.copy_(figures, non_blocking=True)
        else:
            self._values = figures
        self.copied = Moment(device)

    @property
    def ready(self) -> bool:
        """Whether `read` returns at once on every rank."""
        return self.copied.passed

    def read(self) -> tuple[float, float, float, bool, bool, bool]:
        """(loss, gradient norm, tokens, skipped, stop, failed); waits for the step and for nothing after it."""
        self.copied.wait()
        loss, grad_norm, tokens, skipped, stop, failed = self._values[:SCALARS].tolist()
        return loss, grad_norm, tokens, bool(skipped), bool(stop), bool(failed)

    def read_more(self) -> dict[str, float]:
        """Further scalars by name; valid after `read`."""
        values = self._values[SCALARS : SCALARS + len(self._names)].tolist()
        measured = {} if self._measured is None else self._measured()
        return {**dict(zip(self._names, values, strict=True)), **measured}

    def read_statistics(self) -> dict[str, Any]:
        """The step statistics of modules, as numbers and lists, by name; valid after `read`."""
        parts = self._values[SCALARS + len(self._names) :].split([prod(shape) for shape in self._shapes.values()])
        return {
            name: part.view(shape).tolist() for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step, which the device may still execute, with the figures that the CPU has already."""

    step: int
    samples: int
    lr: float
    data_wait_s: float
    figures: Figures


class Report:
    """Reports every step to observers, in order. `stop` becomes true when any rank was asked to stop."""

    stop = False

    def __init__(self, run: Run, parts: Parts, position: Position) -> None:
        self.run, self.parts, self.position = run, parts, position
        self._launched: LaunchedStep | None = None
        self._record: Record | None = None
        self._mark = Moment(run.device)

    def pause(self) -> None:
        """If no step is running, exclude the time since the last one (an evaluation, a save) from the next one."""
        if self._launched is None:
            self._mark = Moment(self.run.device)

    def follow(self, step: LaunchedStep) -> None:
        """Register a launched step, and report the previous one."""
        self.settle()
        self.publish()
        self._launched = step
        if step.figures.ready:
            self.settle()

    def settle(self) -> None:
        """Wait for the running step and read its figures.

        Raises Diverged if the step failed and `trainer.nonfinite` is 'stop'.
        """
        if self._launched is None:
            return
        step, self._launched = self._launched, None
        loss, grad_norm, tokens, skipped, stop, failed = step.figures.read()
        seconds, self._mark = step.figures.copied.since(self._mark), step.figures.copied
        if failed and self.run.config.trainer.nonfinite == "stop":
            scale = step.figures.read_more().get("loss_scale")
            at = f" at the smallest loss scale ({scale:g})" if scale is not None and math.isfinite(loss) else ""
            raise Diverged(
                f"step {step.step} has a loss of {loss} and a gradient norm of {grad_norm}{at}; it changed no weight. "
                f"Resume with a lower optimizer.lr, check the data of this step, or set trainer.nonfinite=skip to skip "
                f"such steps"
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

    def publish(self, **more: float) -> None:
        """Report the settled step to observers, once, with the further figures `more`; do nothing if there is none."""
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
