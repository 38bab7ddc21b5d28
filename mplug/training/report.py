"""Report the figures of each step to observers, without making the device wait for the CPU.

On a GPU, the figures of a step are read while the next step runs. On a CPU, a step is complete when its call returns.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from mplug.contracts.stepper import Record, StepResult
from mplug.errors import Diverged
from mplug.run.run import Run
from mplug.training.hardware import Moment, peak_memory_gib, peak_tflops
from mplug.training.saving import Position

ROWS = ("rows", "squares")
"""The figures of a stream in a step: rows, and the sum of the squared lengths of their segments."""


class PendingRecord:
    """The record of a launched step, whose results are copied to the CPU; the copy is complete at the moment `copied`.

    The CPU knows `step`, `samples`, `lr` and the figures `of_data` already.
    """

    def __init__(
        self,
        result: StepResult,
        device: str,
        step: int,
        samples: int,
        lr: float = 0.0,
        of_data: Mapping[str, float] | None = None,
    ) -> None:
        self.step, self.samples, self.lr, self.of_data = step, samples, lr, of_data or {}
        failed = result.skipped if result.failed is None else result.failed
        always = {name: getattr(result, name) for name in ("loss", "grad_norm", "tokens", "skipped", "stop")}
        rows = {f"{name} {of}": one for name, pair in result.rows.items() for of, one in zip(ROWS, pair, strict=True)}
        scalars = {**always, "failed": failed, **result.figures, **rows}
        self.streams, self._scalars = tuple(result.rows), tuple(scalars)
        self._shapes = {name: tuple(value.shape) for name, value in result.statistics.items()}
        self._measured = result.measured
        tensors = (*scalars.values(), *result.statistics.values())
        values = torch.cat([tensor.double().flatten() for tensor in tensors])
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        else:
            self._values = values
        self.copied = Moment(device)

    @property
    def ready(self) -> bool:
        """Whether `read` returns at once on every rank."""
        return self.copied.passed

    def read(self) -> Record:
        """All results by name; waits for the step and for nothing after it.

        The statistics of modules are numbers and lists, under 'statistics' if there are any.
        """
        self.copied.wait()
        scalars, *statistics = self._values.split([len(self._scalars), *(prod(one) for one in self._shapes.values())])
        found: Record = dict(zip(self._scalars, scalars.tolist(), strict=True))
        found |= {name: bool(found[name]) for name in ("skipped", "stop", "failed")}
        found |= {} if self._measured is None else self._measured()
        if statistics:
            parts = zip(self._shapes.items(), statistics, strict=True)
            found["statistics"] = {name: part.view(shape).tolist() for (name, shape), part in parts}
        return found


class Report:
    """Reports every step to observers, in order.

    `stop` becomes true when any rank was asked to stop, and `relayout` when one was asked to change the layout.
    """

    stop = relayout = False

    def __init__(self, run: Run, position: Position) -> None:
        self.run, self.position = run, position
        self._launched: PendingRecord | None = None
        self._record: Record | None = None
        self.last_loss: float | None = None
        """The loss of the last step that was read."""
        self._mark = Moment(run.device)

    def pause(self) -> None:
        """If no step is running, exclude the time since the last one (an evaluation, a save) from the next one."""
        if self._launched is None:
            self._mark = Moment(self.run.device)

    def follow(self, step: PendingRecord) -> None:
        """Register a launched step, and report the previous one."""
        self.settle()
        self.publish()
        self._launched = step
        if step.ready:
            self.settle()

    def settle(self) -> None:
        """Wait for the running step and read its figures.

        Raises Diverged if the step failed and `trainer.nonfinite` is 'stop'.
        """
        if self._launched is None:
            return
        step, self._launched = self._launched, None
        results = step.read()
        seconds, self._mark = step.copied.since(self._mark), step.copied
        if results.pop("failed") and self.run.config.trainer.nonfinite == "stop":
            raise _diverged(step.step, results, self._explanation(step.step))
        if results.pop("stop"):
            self._ask_for_reason()
        targets = int(results["tokens"])
        self.position.tokens += targets
        self.last_loss = results["loss"]
        rows = {name: [int(results.pop(f"{name} {of}")) for of in ROWS] for name in step.streams}
        self._record = {
            "step": step.step,
            "loss": results.pop("loss"),
            "grad_norm": results.pop("grad_norm"),
            "lr": step.lr,
            "tokens": self.position.tokens,
            "targets_per_s": targets / seconds,
            **self._speed(step.samples, seconds, rows),
            "memory_gib": peak_memory_gib(self.run.device),
            **step.of_data,
            **{name: value for name, value in results.items() if name != "tokens"},
        }

    def _ask_for_reason(self) -> None:
        """Find out, on all ranks after the same step, whether a rank asks for the end or for another layout."""
        asked = self.run.gathered((self.run.stop_requested, self.run.relayout_requested))
        self.relayout = any(relayout for _, relayout in asked)
        self.stop = self.stop or any(stop for stop, _ in asked)

    def publish(self, **more: float) -> None:
        """Report the settled step to observers, once, with the further figures `more`; do nothing if there is none."""
        if self._record is not None:
            if self.run.claim is not None:
                self.run.claim.keep()
            record, self._record = {**self._record, **more}, None
            for _, figures in self.run.hooks.each("step_figures", run=self.run, record=record):
                record |= figures
            self.run.hooks.observe("step_finished", run=self.run, record=record)

    def _explanation(self, step: int) -> str:
        """What a plugin finds out about a step that is not finite; '' if none does. Collective."""
        stepper: Any = self.position.parts.stepper
        if not self.run.hooks.implementers("explain_nonfinite"):
            return ""
        found = self.run.hooks.call.explain_nonfinite(
            run=self.run, step=step, batches=stepper.batches(step), rerun=partial(stepper.rerun, step)
        )
        return self.run.gathered(found or "")[0]  # type: ignore[no-any-return]

    def _speed(self, samples: int, seconds: float, rows: Mapping[str, Sequence[int]]) -> Record:
        length, world_size = self.run.config.trainer.seq_length, self.run.mesh.world_size
        model = self.position.parts.model
        flops = model.flops.of(samples * length, samples * length**2)
        flops += sum(
            model.stream_passes[name].flops.of(*counted)
            for name, counted in rows.items()
            if name in model.stream_passes
        )
        tflops, peak = flops / seconds / 1e12 / world_size, peak_tflops(self.run.device)
        return {
            "step_s": seconds,
            "tokens_per_s": samples * length / seconds,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            **self._rates_of_streams(rows, seconds),
        }

    def _rates_of_streams(self, rows: Mapping[str, Sequence[int]], seconds: float) -> Record:
        """Rows per second of each stream, by its axis: 'patches_per_s'."""
        streams = self.position.parts.model.plan.streams
        first = {axis: stream.lengths[0] for axis, stream in streams.items()}
        return {f"{axis}_per_s": rows[name][0] / seconds for axis, name in first.items() if name in rows}


def _diverged(step: int, results: Record, explanation: str) -> Diverged:
    loss, scale = results["loss"], results.get("loss_scale")
    at = f" at the smallest loss scale ({scale:g})" if scale is not None and math.isfinite(loss) else ""
    remedy = "Resume with a lower optimizer.lr, check the data of this step, or set trainer.nonfinite=skip to skip it"
    if explanation:
        remedy = f"Cause: {explanation}. Remove the cause, and continue with --resume"
    norm = results["grad_norm"]
    return Diverged(
        f"step {step} has a loss of {loss} and a gradient norm of {norm}{at}; it changed no weight. {remedy}"
    )
