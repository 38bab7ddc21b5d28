"""Seconds of one micro batch in each unit of a model on one rank, from its plan, placements and filled slots.

M rows (tokens), N output and K input width of a product, all local to a rank.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from mplug.commands import role_of
from mplug_plan.groups import Group, group_of
from mplug_plan.kernels import Kernels
from mplug_sharding import GatheredPlacement

if TYPE_CHECKING:
    from mplug import Model, Placement, Run, Unit, Work
    from mplug_plan.machine import Machine

BACKWARD = 2.5
"""FLOPs of attention backward to forward: it computes the scores again (FlashAttention-2, arXiv 2307.08691)."""
FORWARD_PASSES, BACKWARD_PASSES = 1.25, 2.0
"""Times that norms, activations, rotations and additions move the operands of a unit's products: a count over a block.

Forward, each operand is written or read once beside the product, and the residual stream adds a quarter. Backward, the
gradients move like this, and inputs that are not kept are computed again from what is.
"""
LOSS_PASSES = 3.0
"""Times that a loss moves logits: it reads them forward, and reads and replaces them backward."""
OVERLAPPED = 0.125
"""The part of a collective that stays exposed if products overlap with it in chunks: the first of eight."""
CAST_FORWARD, CAST_BACKWARD, CAST_GRADIENT = 1.5, 1.5, 2.0
"""Passes over an operand to cast it to 8 bits: an input is read in 16 bits and written in 8, and in backward once more
for the gradient of the weight; a gradient is read once, and written as it is and transposed."""
CAST_WEIGHT = 4.0
"""Passes over a weight in a micro batch: its largest value, the cast, and the transposed cast."""
RECOMPUTING = 1000
"""The least layer of a wrap that recomputes (docs/memory.md)."""
ROW_PASSES = 4.0
"""Times that the rows of chosen experts move in a pass: put in order and brought back, each read and written."""


@dataclass
class Seconds:
    """Seconds of one micro batch. Collectives are those that computation waits for."""

    products: float = 0.0
    input_gradients: float = 0.0
    weight_gradients: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    others: float = 0.0
    others_backward: float = 0.0
    collectives: float = 0.0
    collectives_backward: float = 0.0

    def add(self, other: "Seconds") -> None:
        """Add another part."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def forward_times(self, factor: float) -> "Seconds":
        """The parts of the forward pass alone, `factor` as long."""
        names = ("products", "attention", "others", "collectives")
        return Seconds(**{name: factor * getattr(self, name) for name in names})

    @property
    def forward(self) -> float:
        """The forward pass."""
        return self.products + self.attention + self.others + self.collectives

    @property
    def input_half(self) -> float:
        """The gradients of activations."""
        return self.input_gradients + self.attention_backward + self.others_backward + self.collectives_backward

    @property
    def backward(self) -> float:
        """The whole backward pass."""
        return self.input_half + self.weight_gradients


class Sides(NamedTuple):
    """Local rows, output width, input width and the number of matrices of a product with a weight."""

    rows: float
    out: int
    depth: int
    matrices: int


@dataclass(frozen=True)
class UnitCost:
    """A unit's seconds, and the bytes of its weights that ranks gather for each pass, with their group."""

    name: str
    seconds: Seconds
    gathered: float = 0.0
    group: Group | None = None
    again: float = 0.0
    """The part of the units of this kind whose forward pass backward repeats."""


class Costs:
    """Reads the costs of the units of a model."""

    def __init__(self, run: "Run", model: "Model", machine: "Machine", kernels: Kernels) -> None:
        self.run, self.model, self.machine, self.kernels = run, model, machine, kernels
        self.itemsize = run.precision.activation_dtype.itemsize
        self.axes = [axis for axis in run.mesh.axes.values() if axis.size > 1]
        self.work = defaultdict(list)
        for one in model.plan.work or ():
            self.work[one.unit].append(one)
        self.filled = {(one.site.role, one.site.slot): one.offer for one in model.slots}
        self.recomputed = self._recomputed()
        self.base = set(model.base_modules or ())
        self.sequence = run.config.resolved()["parallel"].get("cp", {})
        stages = run.mesh.axes[model.stages.axis].size if model.stages.axis else 1
        self.ranks_of_stage = run.mesh.world_size // stages  # the pipeline's axis varies slowest

    def units(self) -> dict[str, UnitCost]:
        """The cost of every unit, by name; units of a role with equal work are counted once."""
        found, by_kind = dict[str, UnitCost](), dict[object, UnitCost]()
        for unit in self.model.plan.units:
            role = role_of(unit.name)
            key = (role, self._is_base(unit.name), unit.sequence, self._signature(unit))
            if key not in by_kind:
                by_kind[key] = self._unit(unit)
            found[unit.name] = replace(by_kind[key], name=unit.name, again=self.recomputed.get(role, 0.0))
        return found

    def _signature(self, unit: "Unit") -> tuple[object, ...]:
        """What makes units of a role differ: blocks of a hybrid have other mixers, and some have no experts."""
        return tuple((role_of(one.name), one.is_weight, one.flops) for one in self.work[unit.name])

    def _recomputed(self) -> dict[str, float]:
        """By role, the part of this rank's units that are computed again; other stages are taken to be alike."""
        units, again = Counter(role_of(unit.name) for unit in self.model.own_units), Counter[str]()
        for filled in self.model.unit_wraps:
            again[filled.site.role] += any(wrap.layer >= RECOMPUTING for wrap in filled.wraps)
        return {role: again[role] / count for role, count in units.items()}

    def _unit(self, unit: "Unit") -> UnitCost:
        seconds, (tokens, squares) = Seconds(), self._rows(unit)
        operands, activated, logits = 0.0, 0.0, 0.0
        for one in self.work[unit.name]:
            if not one.is_weight:
                seconds.add(self._attention(one, tokens, squares))
                continue
            placement = self.model.placement_of(one.name)
            sides = self._sides(placement, one, tokens)
            if sides is None:
                continue
            is_8bit = self.run.precision.recipe is not None and not self._is_base(one.name)
            seconds.add(self._product(sides, 1 if is_8bit else 2))
            seconds.add(self._around(one.name, sides, tokens))
            out, inner = (self._moved(placement, sides, dim) for dim in (-2, -1))
            is_loss = unit.name == self.model.plan.units[-1].name and "vocab" in placement.parameter.axes
            logits += out if is_loss else 0.0
            operands += inner if is_loss else out + inner
            activated += sum(
                size
                for dim, size in ((-2, out), (-1, inner))
                if any(segment.axis == "mlp" for segment in placement.dims[dim])
            )
            if is_8bit:
                seconds.add(self._casts(placement, inner, out))
        operands += 0.0 if self.work[unit.name] else 2 * tokens * self._width()
        operands -= activated if self.kernels.fuses_activation else 0.0
        moved = self.itemsize / (self.machine.kernel_rate * self.kernels.between)
        seconds.others += moved * (FORWARD_PASSES * operands + logits)
        seconds.others_backward += moved * (BACKWARD_PASSES * operands + (LOSS_PASSES - 1) * logits)
        seconds.add(self._lookup(unit, tokens))
        seconds.add(self._experts(unit, tokens))
        gathered, group = self._gathered(unit)
        return UnitCost(unit.name, seconds, gathered, group)

    # The parts of a unit.

    def _product(self, sides: Sides, itemsize: int) -> Seconds:
        """Forward [M, K] x [K, N], the gradient of the input [M, N] x [N, K], that of the weight [N, M] x [M, K]."""
        of, (rows, out, depth, matrices) = self.machine.product, sides
        if matrices == 1:
            return Seconds(
                of(rows, out, depth, itemsize), of(rows, depth, out, itemsize), of(out, depth, rows, itemsize)
            )
        each, rate = rows / matrices, self.kernels.grouped or self.machine.grouped
        weights = self.kernels.grouped or self.machine.grouped_weights
        return Seconds(
            products=matrices * of(each, out, depth, itemsize) / rate,
            input_gradients=matrices * of(each, depth, out, itemsize) / rate,
            weight_gradients=matrices * of(out, depth, each, itemsize) / weights,
        )

    def _casts(self, placement: "Placement", inner: float, out: float) -> Seconds:
        """Casts of the operands of a product to 8 bits: inputs [inner], gradients [out], and its weight."""
        cast = self.itemsize / self.machine.cast_rate
        weight = 0.0 if self.kernels.keeps_weights else CAST_WEIGHT * prod(placement.local_shape(self._rank(placement)))
        forward = 0.0 if self.kernels.fuses_casts else CAST_FORWARD * inner
        return Seconds(
            others=cast * (forward + weight / 2),
            others_backward=cast * (CAST_BACKWARD * inner + CAST_GRADIENT * out + weight / 2),
        )

    def _attention(self, work: "Work", tokens: float, squares: float) -> Seconds:
        flops = work.flops.of(round(tokens), round(squares)) / self._split("heads")
        length = squares / max(tokens, 1)
        rate = self.machine.attention_rate * self.kernels.attention * length / (length + self.machine.half_length)
        seconds = Seconds(attention=flops / 3 / rate, attention_backward=flops / 3 * BACKWARD / rate)
        seconds.add(self._along_sequence(tokens))
        return seconds

    def _along_sequence(self, tokens: float) -> Seconds:
        """Keys and values that ranks exchange if they divide the sequence of entries (context parallelism)."""
        for axis in self.axes:
            if "sequence" in axis.entries:
                group = group_of(self.run.mesh, (axis.name,), self.machine)
                width = 2 * self._heads_width("kv_heads")
                whole = self.itemsize * tokens * axis.size * width
                once = self.machine.collective(whole, group.size, group.in_a_node)
                if self.sequence.get("method") == "ulysses":
                    return self._heads_exchanged(tokens, group)
                forward = self._seconds_of_attention(tokens, axis.size)
                # The ring hides what attention of a part takes. Backward passes keys, values and their gradients.
                return Seconds(
                    collectives=max(once - forward, 0.1 * once),
                    collectives_backward=max(2 * once - BACKWARD * forward, 0.2 * once),
                )
        return Seconds()

    def _heads_exchanged(self, tokens: float, group: Group) -> Seconds:
        """Queries, keys, values and results change their owners around attention (Ulysses, arXiv 2309.14509).

        They are packed before and unpacked after. Nothing hides the exchange.
        """
        width = 2 * (self._heads_width("heads") + self._heads_width("kv_heads"))
        size = self.itemsize * tokens * width
        once = self.machine.collective(size, *group)
        packed = 4 * size / self.machine.copy_rate
        return Seconds(others=packed, others_backward=packed, collectives=once, collectives_backward=once)

    def _seconds_of_attention(self, tokens: float, ranks: int) -> float:
        heads = self._heads_width("heads")
        flops = 2 * tokens * self.run.config.trainer.seq_length * heads
        return flops / (self.machine.attention_rate * self.kernels.attention) * (ranks - 1) / ranks

    def _around(self, name: str, sides: Sides, tokens: float) -> Seconds:
        """Collectives around a product whose weight ranks divide: gathered before, or summed after."""
        role = role_of(name.rpartition(".")[0])
        gathers, sums = (self.filled.get((role, slot)) is not None for slot in ("Linear.gather", "Linear.scatter"))
        axis = next((axis for axis in self.axes if "mlp" in axis.splits), None)
        if axis is None or not (gathers or sums):
            return Seconds()
        group = group_of(self.run.mesh, (axis.name,), self.machine)
        whole = self.itemsize * tokens * (sides.depth if gathers else sides.out)
        once = self.machine.collective(whole, group.size, group.in_a_node)
        overlaps = self.filled.get((role, "Linear.product")) is not None
        if "sequence" not in axis.activations:  # an all-reduce in one of both passes
            return Seconds(collectives_backward=2 * once) if gathers else Seconds(collectives=2 * once)
        if not overlaps:
            return Seconds(collectives=once, collectives_backward=once)
        # Chunks are put together by a copy. The input is gathered once more for the gradient of the weight.
        copied, again = 2 * whole / self.machine.copy_rate, 1 if gathers else 0
        part = OVERLAPPED * once
        return Seconds(
            others=copied * again,
            others_backward=copied,
            collectives=part,
            collectives_backward=part * (1 + again),
        )

    def _lookup(self, unit: "Unit", tokens: float) -> Seconds:
        """The sum after a look-up in a table whose rows ranks divide."""
        axis = next((axis for axis in self.axes if "vocab" in axis.splits), None)
        if axis is None or self.work[unit.name]:
            return Seconds()
        group = group_of(self.run.mesh, (axis.name,), self.machine)
        once = self.machine.collective(self.itemsize * tokens * self._width(), group.size, group.in_a_node)
        return Seconds(collectives=once, collectives_backward=once)

    def _experts(self, unit: "Unit", tokens: float) -> Seconds:
        """Rows that travel to the ranks of their experts and back, forward and backward."""
        axis = next((axis for axis in self.axes if "expert" in axis.splits), None)
        for one in self.work[unit.name]:
            if not one.is_weight:
                continue
            placement = self.model.placement_of(one.name)
            sides = self._sides(placement, one, tokens)
            if "expert" in placement.parameter.axes and sides is not None:
                size = self.itemsize * sides.rows * self._width()
                moved = ROW_PASSES * size / self.machine.copy_rate
                once = 0.0
                if axis is not None:
                    group = group_of(self.run.mesh, (axis.name,), self.machine)
                    once = self.machine.collective(size, group.size, group.in_a_node)
                return Seconds(others=moved, others_backward=moved, collectives=2 * once, collectives_backward=2 * once)
        return Seconds()

    def _gathered(self, unit: "Unit") -> tuple[float, Group | None]:
        found, group = 0.0, None
        for name, placement in self.model.placements.items():
            if isinstance(placement, GatheredPlacement) and name.startswith(f"{unit.name}."):
                found += prod(placement.gathered_shape(placement.stages[0] * self.ranks_of_stage))
                group = group or group_of(self.run.mesh, (placement.axis,), self.machine)
        return found * self.run.precision.weight_dtype.itemsize, group

    # Sizes.

    def _sides(self, placement: "Placement", work: "Work", tokens: float) -> Sides | None:
        """The local sides of a product; None if the parameter is no matrix."""
        rank = self._rank(placement)
        local = placement.gathered_shape if isinstance(placement, GatheredPlacement) else placement.local_shape
        shape = local(rank)
        logical = prod(placement.shape[-2:])
        if len(shape) < 2 or not logical:
            return None
        times = work.flops.per_token / (6 * logical)
        return Sides(times * tokens, shape[-2], shape[-1], max(prod(shape[:-2]), 1))

    def _rank(self, placement: "Placement") -> int:
        """A rank that has the parameter."""
        return placement.stages[0] * self.ranks_of_stage

    def _moved(self, placement: "Placement", sides: Sides, dim: int) -> float:
        """The elements of a product's operand; ranks of sequence parallelism divide it where its width is whole."""
        names = {segment.axis for segment in placement.dims[dim]}
        return sides.rows * sides[3 + dim] / self._shared(names)

    def _shared(self, names: set[str]) -> int:
        sharing = (axis for axis in self.axes if "sequence" in axis.activations and "sequence" not in axis.entries)
        return prod(axis.size for axis in sharing if names.isdisjoint(axis.splits))

    def _rows(self, unit: "Unit") -> tuple[float, float]:
        """(rows, sum of squared lengths) of a micro batch that a rank computes in a unit."""
        samples, length = self.run.micro_batch_size, self.run.config.trainer.seq_length
        if unit.sequence in self.model.plan.streams:
            stream = self.model.plan.streams[unit.sequence]
            ranks = prod(axis.size for axis in self.axes if axis.shares_streams)
            return samples * stream.rows / ranks, samples * stream.squares / ranks
        ranks = prod(axis.size for axis in self.axes if "sequence" in axis.entries)
        return samples * length / ranks, samples * length**2 / ranks

    def _split(self, named: str) -> int:
        return prod(axis.size for axis in self.axes if named in axis.splits)

    def _width(self) -> int:
        """The width of the residual stream."""
        return next(
            segment.length
            for placement in self.model.placements.values()
            for dim in placement.dims
            for segment in dim
            if segment.axis == "embed"
        )

    def _heads_width(self, named: str) -> float:
        """The elements of a token's queries (or of its keys) on a rank."""
        found = max(
            (
                segment.length
                for placement in self.model.placements.values()
                for dim in placement.dims
                for segment in dim
                if segment.axis == named
            ),
            default=0,
        )
        return found / self._split(named)

    def _is_base(self, name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in self.base)
