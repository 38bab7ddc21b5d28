"""A stepper that records each training step once and then replays it (`trainer.graphs`).

A step is two recordings. The first has the exchange of the weights of the last update, forward and backward of all
micro batches, and the reduction of gradients; the second has their norm and the update. So the CPU launches two graphs
instead of thousands of kernels, and a plugin may look at the passes before the update (`build_step_check`). Before a
replay, the CPU copies the step's micro batches and the counts of their targets, learning rate, weight decay, random key
and request to stop into the tensors that the recordings read. After it, the results are copied out.

No Python code of a step runs in a replay. Three consequences:

- A branch that depends on state of the CPU is recorded as it was taken. The flags `stale` of gradient sinks decide such
  branches: the first contribution of a step overwrites a buffer, and further contributions add to it. `begin_step` sets
  all flags, so a step does not depend on the flags that it finds. Which contribution is the first follows from the
  units and the number of micro batches, and these are equal in all steps of a shape. So all steps of a shape take the
  same branches. A replay neither reads nor changes a flag, and an eager step after it sets the flags anew. The same
  holds for the sinks' `final`, `last` and `owed`, for the counters of strategies, and for `Model.weights_version`,
  which only says within a step which unit makes the copies of a weight.
- `Model.weights_written` is called when a step begins, not when it ends. Therefore forward hides the exchange of
  weights in the recording too, and nothing is in flight when the recording ends. Copies of weights on other ranks, and
  copies in other formats, are those of the last step only after another call; `evaluate` makes it.
- Passes that run again, because a plugin says that they were not exact (`Model.is_repeating`), run eagerly: the plugin
  decides on the CPU that they are exact now. The update after them is eager too, for it reads what the passes left on
  the CPU and in new memory.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug import DefaultStepper, RankBatch, RunError, StepResult, UsageError
from mplug.tensors.random import step_key
from mplug_faults import failed_part
from mplug_graphs.recording import CudaGraph, Recording

log = logging.getLogger("mplug")

WARMUP = 3
"""Eager steps of a shape before it is recorded. Meanwhile kernels compile, and libraries allocate and connect."""
MOST = 8
"""Shapes of which recordings are kept; a batch ramp-up has more, but never returns to one."""


@dataclass
class Shape:
    """The steps with micro batches of the same shapes: the memory of the micro batches, and the recordings."""

    batches: list[RankBatch]
    num_eager: int = 0
    passes: Recording | None = None
    of_update: Recording | None = None
    result: StepResult | None = None

    @classmethod
    def of(cls, batches: list[RankBatch]) -> "Shape":
        """A shape without a recording, with memory of its own."""
        return cls([replace(one, entries={name: torch.empty_like(x) for name, x in one.items()}) for one in batches])

    def fill(self, batches: list[RankBatch]) -> None:
        """Copy a step's micro batches into the memory that the recording reads."""
        for own, batch in zip(self.batches, batches, strict=True):
            for name, entry in own.items():
                entry.copy_(batch[name], non_blocking=True)


def shape_of(batches: Iterable[RankBatch]) -> tuple[Any, ...]:
    """What must be equal for steps that share a recording: names, shapes and dtypes of the entries, and positions."""
    return tuple(
        (batch.is_last, batch.positions, *((name, tuple(x.shape), x.dtype) for name, x in batch.items()))
        for batch in batches
    )


class GraphedStepper:
    """The steps of `default`, recorded once for each shape after `WARMUP` eager steps of it."""

    def __init__(self, default: DefaultStepper, recording: Callable[[], Recording] | None = None) -> None:
        self.default, self.run, self.model = default, default.run, default.model
        self._recording = recording or partial(CudaGraph, torch.cuda.graph_pool_handle())
        self._key = torch.zeros((), dtype=torch.int64, device=self.run.device)
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._current: Shape | None = None
        self._is_eager = False

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Compute the passes of the step: eagerly, or by a replay."""
        batches = list(micro_batches)
        self._current = shape = self._shape(batches)
        shape.fill(batches)
        self.default.token_scale.count(batches)
        self._key.fill_(step_key(self.default.seed, step))
        self._is_eager = self.model.is_repeating or shape.num_eager < WARMUP
        if self._is_eager:
            self._passes(shape)
            return
        if shape.passes is None:
            self._record(shape)
        assert shape.passes is not None
        shape.passes.replay()

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Compute the update: eagerly, if the passes were eager, else by a replay."""
        assert self._current is not None, "forward_backward comes first"
        shape, self._current = self._current, None
        self.default.set_rates(lr, weight_decay)
        if self._is_eager:
            shape.num_eager += 1
            return self._update()
        assert shape.of_update is not None
        assert shape.result is not None
        shape.of_update.replay()
        return copied(shape.result)

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss of forward passes, which are never recorded."""
        self.model.weights_written()
        return self.default.evaluate(micro_batches)

    @property
    def num_recorded(self) -> int:
        """How many shapes have a recording now."""
        return sum(shape.passes is not None for shape in self._shapes.values())

    def _shape(self, batches: list[RankBatch]) -> Shape:
        key = shape_of(batches)
        if key not in self._shapes:
            if len(self._shapes) == MOST:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = Shape.of(batches)
        return self._shapes[key]

    def _passes(self, shape: Shape) -> None:
        """The work of the passes. It reads no value of the CPU that differs between steps of the shape."""
        default = self.default
        self.model.weights_written()
        default.begin_step(self.run.step)
        default.token_scale.set()
        default.accumulate(shape.batches, partial(default.keyed, key=self._key))
        self.model.weights_settled()  # a unit that does not run has not waited for its weights

    def _update(self) -> StepResult:
        """The work of the update. It reads no value of the CPU that differs between steps of the shape."""
        return self.default.apply(self.default.norm(), _nothing)

    def _record(self, shape: Shape) -> None:
        """Record the passes, and then the update, which reads what the passes have left on the CPU."""
        passes, of_update = self._recording(), self._recording()
        try:
            passes.record(partial(self._passes, shape))
            shape.result = of_update.record(self._update)
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(
                f"the step cannot be recorded as a CUDA graph: {failed_part(self.run.hooks, error)}; set "
                f"trainer.graphs=false, or replace the part that makes the CPU wait for the device"
            ) from error
        shape.passes, shape.of_update = passes, of_update
        log.info("recorded step %d with %d micro batches as a CUDA graph", self.run.step, len(shape.batches))


def copied(result: StepResult) -> StepResult:
    """The result in memory of its own, which the next replay does not overwrite."""
    return StepResult(**{field.name: _copied(getattr(result, field.name)) for field in fields(result)})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value if value is None else {name: tensor.clone() for name, tensor in value.items()}


def _nothing() -> None:
    """Weights are exchanged when the next step begins."""
