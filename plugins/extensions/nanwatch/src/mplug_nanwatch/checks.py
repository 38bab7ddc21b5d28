"""Checks of one rank: what its units return, forward and backward, and whether it is finite.

In every step, two sums per micro batch are kept on the device: of what leaves the rank's last unit forward, and of what
its first unit receives backward. The CPU reads them only if the step turns out not to be finite: they show the rank at
which a transient fault happened. In the rerun, everything that leaves a unit is checked.
"""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug import GradientSink, Model, RankBatch, Run, Unit
from mplug_nanwatch.finding import Check, RankReport

KEPT = 2
"""Steps whose sums are kept: on a GPU, the figures of a step are read when the next one has been launched."""

LARGEST = 1e18
"""Sums above this count as not finite: the square of such a gradient overflows in fp32, and so does the norm."""


class Checks:
    """The checks of this rank."""

    def __init__(self, run: Run, model: Model, gradients: bool = False) -> None:
        self._run, self._model = run, model
        self._places = {unit.name: place for place, unit in enumerate(model.plan.units)}
        self._sums: dict[int, list[tuple[int, Tensor]]] = {}
        """By step: places in the flow of data, and the sums there."""
        self._flags: list[tuple[Check, Tensor]] | None = None
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._sizes: list[int] = []
        for unit in model.own_units:
            part = model.module.get_submodule(unit.name)
            setattr(part, unit.method, partial(self._checked, unit, getattr(part, unit.method)))
        if gradients:
            for sink in model.sinks.values():
                sink.listeners.insert(0, self._sum_sink)

    def begin(self, step: int) -> None:
        """A step begins."""
        self._sums = {number: sums for number, sums in self._sums.items() if number > step - KEPT}
        self._sums[step] = []

    def diagnose(self, step: int, batches: Sequence[RankBatch], rerun: Callable[[], None]) -> RankReport:
        """Run the passes of a step again with all checks, and report what is not finite. Collective."""
        sums = [place for place, one in self._sums.get(step, []) if not bool(one.abs() < LARGEST)]
        entries = tuple(_bad_entries(batch) for batch in batches)
        weights = [name for name, one in self._model.parameters().items() if not bool(one.detach().isfinite().all())]
        self._flags, self._calls = [], defaultdict(int)
        self._sizes = [len(batch["sample_ids"]) for batch in batches]
        try:
            with self._checking_gradients():
                rerun()
            flags = self._flags
        finally:
            self._flags = None
        return RankReport(
            rank=self._run.rank,
            host=socket.gethostname(),
            first_sum=min(sums, default=None),
            samples=tuple(tuple(batch["sample_ids"].tolist()) for batch in batches),
            entries=tuple(sentence for found in entries for sentence in found),
            weights=tuple(weights),
            checks=tuple(found for check, flag in flags if (found := check.read(flag)) is not None),
        )

    def _checked(self, unit: Unit, run: Callable[..., Any], *inputs: Any, **optional: Any) -> Any:
        """A unit's forward pass, with checks of what it returns."""
        outputs = run(*inputs, **optional)
        if not torch.is_grad_enabled() or not self._model.module.training:
            return outputs
        named = list(zip(unit.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
        if self._flags is None:
            self._sum(unit, named)
            return outputs
        number = self._calls[unit.name]
        self._calls[unit.name] += 1
        place = self._places[unit.name]
        for name, output in named:
            self._check(Check(number, place, unit.name, f"its output '{name}'"), output)
        last = 2 * len(self._places)
        for name, x in (*zip(unit.inputs, inputs, strict=False), *optional.items()):
            if isinstance(x, Tensor) and x.requires_grad:
                check = Check(number, last - place, unit.name, f"the gradient of its input '{name}'")
                x.register_hook(partial(self._check, check))
        return outputs

    def _sum(self, unit: Unit, named: Sequence[tuple[str, Any]]) -> None:
        """Keep the sums of a normal step."""
        sums, own = self._sums.get(self._run.step), self._model.own_units
        if sums is None:
            return
        floats = [one for _, one in named if isinstance(one, Tensor) and one.is_floating_point()]
        place = self._places[unit.name]
        if unit is own[-1]:
            sums += [(place, _sum_of(one)) for one in floats]
        if unit is own[0]:
            for one in floats:
                if one.requires_grad:
                    one.register_hook(partial(_append, sums, 2 * len(self._places) - place))

    def _sum_sink(self, sink: GradientSink) -> None:
        """Keep the sum of a gradient of a normal step that is final on this rank."""
        if self._flags is None and (sums := self._sums.get(self._run.step)) is not None:
            sums.append((2 * len(self._places) + 1, _sum_of(sink.buffer)))

    def _check(self, check: Check, x: Any) -> None:
        if self._flags is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return
        size = self._sizes[check.number] if check.number < len(self._sizes) else 0
        has_rows = x.dim() > 1 and x.shape[0] == size
        finite = x.detach().isfinite()
        self._flags.append((check, ~finite.flatten(1).all(1) if has_rows else ~finite.all().view(1)))

    @contextmanager
    def _checking_gradients(self) -> Iterator[None]:
        """Check each gradient when it is final on this rank, before a strategy sums it over other ranks."""
        units = {
            id(parameter): unit.name
            for unit in self._model.own_units
            for parameter in self._model.module.get_submodule(unit.name).parameters()
        }
        added: list[tuple[GradientSink, Any]] = []
        for name, sink in self._model.sinks.items():
            unit = units.get(id(sink.parameter), "")
            place = 2 * len(self._places) - self._places.get(unit, 0)
            listener = partial(self._check_sink, Check(-1, place, unit, f"the gradient of its weight '{name}'"))
            sink.listeners.insert(0, listener)
            added.append((sink, listener))
        try:
            yield
        finally:
            for sink, listener in added:
                sink.listeners.remove(listener)

    def _check_sink(self, check: Check, sink: GradientSink) -> None:
        if self._flags is not None:
            self._flags.append((check, ~sink.buffer.isfinite().all().view(1)))


def _append(sums: list[tuple[int, Tensor]], place: int, gradient: Tensor) -> None:
    sums.append((place, _sum_of(gradient)))


def _sum_of(x: Tensor) -> Tensor:
    """The sum of all elements: not finite if one of them is not, without a copy."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().sum(dtype=wide)


def _bad_entries(batch: RankBatch) -> list[str]:
    """Sentences about entries of a micro batch that hold values that are not finite."""
    found = []
    for name, values in batch.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            ids = batch["sample_ids"].tolist()
            has_rows = values.dim() > 0 and len(values) == len(ids)
            bad = (
                [one for one, row in zip(ids, values, strict=True) if not bool(row.isfinite().all())]
                if has_rows
                else ids
            )
            found.append(f"the entry '{name}' of {'sample' if len(bad) == 1 else 'samples'} {', '.join(map(str, bad))}")
    return found
