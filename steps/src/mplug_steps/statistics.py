"""Step statistics: values that modules and suppliers count in a step, and the host sums or maximises when it ends."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mplug.errors import UsageError
from mplug.gradients.region import region
from mplug.layout.placement import Box, Placement
from mplug.layout.plan import Plan
from mplug.run.run import Run
from mplug.training.steps import NoStatistics
from mplug_ops import Exchange, Item

NEUTRAL = {"sum": 0.0, "max": float("-inf")}
"""The value of each reduction that changes no result."""


class Statistics(NoStatistics):
    """The statistics that the buffers of a plan describe, for all stages; a rank has the buffers of its own modules.

    The axes over which a statistic is reduced are the `partial_axes` of its placement; independent workers are reduced
    together, so that modules that learn from statistics stay equal. If several ranks count the same
    values, the reduction includes one of them: the rank with index 0 along every other mesh axis that does not split
    the buffer (the pipeline's axis excepted). A rank need not know the buffers of other stages.

    `updates` are called after each step with `skip`, before `step_ended` of modules. `totals` are the whole statistics
    of the step by the names of the buffers, after `finish`.
    """

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        plan: Plan,
        placements: Mapping[str, Placement],
        updates: Iterable[Callable[[Tensor], None]] = (),
    ) -> None:
        self.run, self.placements, self.updates = run, placements, list(updates)
        described = plan.match_buffers(placements)
        self.described = {name: one for name, one in described.items() if one.is_statistic}
        self.own = {name: buffer for name, buffer in module.named_buffers() if name in self.described}
        self.counted = {name for name in self.own if self._counts(name)}
        self.shapes = self._shapes_of_all_ranks()
        everyone = None if run.groups is None else run.groups.of(run.mesh.everyone)
        self._exchanges = {
            reduction: Exchange(f"statistics ({reduction})", everyone, (Item(*one) for one in shapes.items()))
            for reduction, shapes in self.shapes.items()
        }
        self.totals: Mapping[str, Tensor] = {}
        self.learners: list[Any] = [part for part in module.modules() if hasattr(part, "step_ended")]

    def _counts(self, name: str) -> bool:
        placement = self.placements[name]
        reduced = {*placement.partial_axes, *placement.splits.values(), *self.run.mesh.independent}
        return all(
            axis.name in reduced or "units" in axis.activations or self.run.mesh.index(self.run.rank, axis.name) == 0
            for axis in placement.view
        )

    def _shapes_of_all_ranks(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Reduction -> the logical shapes of the statistics of all stages, in one order on all ranks.

        Collective. Raises UsageError on all ranks if two ranks of one stage have different statistics.
        """
        mesh, reductions = self.run.mesh, {name: self.described[name].reduction for name in self.described}
        own = {name: (reductions[name], self.placements[name].shape) for name in self.described}
        stages = [axis.name for axis in mesh.axes.values() if "units" in axis.activations]
        stage = tuple(mesh.index(self.run.rank, axis) for axis in stages)
        first: dict[tuple[int, ...], tuple[int, Any]] = {}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {reduction: {} for reduction in NEUTRAL}
        for rank, (place, found) in enumerate(self.run.gathered((stage, own))):
            other, expected = first.setdefault(place, (rank, found))
            if found != expected:
                name = min(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
                raise UsageError(
                    f"ranks {other} and {rank} have the same units, and different buffers '{name}': an offer must "
                    f"declare the same buffers on every rank (Offer.buffers)"
                )
            for name, (reduction, shape) in found.items():
                shapes[reduction][name] = shape
        return shapes

    def begin_step(self) -> None:
        """Set this rank's sums to zero, and its maxima to their initial values."""
        maxima = {name: one.value for name, one in self.described.items() if one.reduction == "max" and one.value}
        zeroed = [buffer for name, buffer in self.own.items() if name not in maxima]
        if zeroed:
            torch._foreach_zero_(zeroed)
        for name in maxima.keys() & self.own.keys():
            self.own[name].fill_(maxima[name])

    def finish(self, num_targets: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
        """Replace this rank's buffers by the values over all ranks; returns the statistics of all stages, as reported.

        The values are those of all micro batches, of forward and backward.
        """
        totals = self._reduced("sum", self.run.summed) | self._reduced("max", self.run.largest)
        self._write(totals)
        self.totals = totals
        divisors = {
            name: num_targets if one.per_target else num_tokens if one.per_token else None
            for name, one in self.described.items()
            if one.reported
        }
        values = {name: totals[name] if by is None else totals[name] / by for name, by in divisors.items()}
        names = {name: self.described[name].reported for name in values}
        return {name if names[name] is True else str(names[name]): value for name, value in values.items()}

    def _reduced(self, reduction: str, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The logical statistics of one reduction over all ranks, in fp64."""
        shapes = self.shapes[reduction]
        if not shapes:
            return {}
        sizes = [prod(shape) for shape in shapes.values()]
        dtype = next((self.own[name].dtype for name in shapes if name in self.own), torch.float64)
        nothing = torch.full((max(sizes),), NEUTRAL[reduction], dtype=dtype, device=self.run.device)
        parts = [
            self._own_part(name, nothing[:size].view(shape)) if name in self.counted else nothing[:size]
            for (name, shape), size in zip(shapes.items(), sizes, strict=True)
        ]
        self._exchanges[reduction].check()
        totals = reduce(torch.cat(parts).double()).split(sizes)
        return {name: total.view(shape) for (name, shape), total in zip(shapes.items(), totals, strict=True)}

    def _own_part(self, name: str, nothing: Tensor) -> Tensor:
        """This rank's values in the logical tensor, flat; `nothing` [...] has the value that changes no result."""
        if not self.placements[name].splits:
            return self.own[name].flatten()
        whole = nothing.to(self.own[name].dtype, copy=True)
        for box, values in self._boxes(name):
            _part(whole, box).copy_(values)
        return whole.flatten()

    def _write(self, totals: Mapping[str, Tensor]) -> None:
        whole = [name for name in self.own if not self.placements[name].splits]
        if whole:
            torch._foreach_copy_([self.own[name] for name in whole], [totals[name] for name in whole])
        for name in self.own.keys() - set(whole):
            for box, values in self._boxes(name):
                values.copy_(_part(totals[name], box))

    def _boxes(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of this rank's part of a buffer, with their values."""
        for box in self.placements[name].boxes(self.run.rank):
            yield box, region(self.own[name], box)

    def tell(self, skip: Tensor) -> None:
        """Update states from the step's statistics. With `skip` = 1, the states must stay as they are."""
        for update in self.updates:
            update(skip)
        for module in self.learners:
            module.step_ended(skip)


def _part(whole: Tensor, box: Box) -> Tensor:
    """The view of a logical tensor at a box."""
    return whole[tuple(slice(start, start + length) for start, length in zip(box.start, box.shape, strict=True))]
