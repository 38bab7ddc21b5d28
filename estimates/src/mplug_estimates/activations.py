"""Estimates the memory of activations before anything runs, from the plan, the placements and the filled slots.

A matrix product keeps its input for backward, and what follows it keeps its output: norms, products of activations and
activation functions keep their inputs. So a unit keeps about the input and the output of each of its products, for
every token of every micro batch in flight; compiled units keep less (`CompiledUnits`). `docs/memory.md` compares the
estimate with measured memory.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import TYPE_CHECKING

from mplug.layout.gradient_flow import carrying
from mplug.layout.names import role_of
from mplug.layout.plan import TOKENS_AXIS, Unit
from mplug.model.slots.offers import RECOMPUTING
from mplug.precisions.dtypes import FORMATS
from mplug_estimates.compiled import CompiledUnits
from mplug_sharding import GatheredPlacement

if TYPE_CHECKING:
    from collections.abc import Set

    from mplug.layout.placement import Placement
    from mplug.layout.work import Work
    from mplug.model.model import Model
    from mplug.run.run import Run

EAGER = 1.4
"""Bytes that eager units keep, over the inputs and outputs of products: rotations, activation functions and norms keep
intermediate results (measured: docs/memory.md). Compiled units recompute most of them."""
EAGER_LOSS = 12
"""Bytes per logit that the loss holds for a moment where units are eager: three copies in fp32."""
MOST_LOSS = 768 << 20
"""At most, because the loss widens logits in chunks."""
FP32 = 4
"""Bytes of an element of a gradient that is summed over micro batches or ranks."""
AHEAD = 1
"""Units whose weights are gathered before their turn (FSDP), beside the unit that computes."""
CERTAIN = 0.5
"""The part of the estimate that a run surely needs: kernels may keep operands in 8 bits, or fewer of them."""
LABELS = (
    "activations of matrix products",
    "values for pairs of positions",
    "logits",
    "gradients, recomputed units and gathered weights",
)
"""The parts of the estimate."""


@dataclass
class Kept:
    """Bytes of one micro batch that a unit, or several units, keep for backward, by their kind."""

    products: float = 0.0
    pairs: float = 0.0
    logits: float = 0.0
    certain: float = 0.0

    @property
    def all(self) -> float:
        """The sum of all kinds."""
        return self.products + self.pairs + self.logits

    def add(self, other: "Kept", times: float = 1.0) -> None:
        """Add another part, `times` as large."""
        self.products += times * other.products
        self.pairs += times * other.pairs
        self.logits += times * other.logits
        self.certain += times * other.certain


@dataclass
class Activations:
    """The estimated activations of a rank in bytes, at the peak of a step.

    `kept` is for the micro batches in flight; `in_flight` is their number. `passing` is what exists for a moment: the
    gradient of the largest result of a product, a unit that is computed again, and gathered weights of units with their
    gradients. `moved` is kept in the memory of the CPU. `certain` is a lower bound.
    """

    kept: Kept = field(default_factory=Kept)
    in_flight: float = 1.0
    passing: float = 0.0
    moved: float = 0.0

    @property
    def expected(self) -> int:
        """The estimate."""
        return int(self.kept.all + self.passing)

    @property
    def certain(self) -> int:
        """What the run needs at least."""
        return int(CERTAIN * self.kept.certain)

    def parts(self) -> dict[str, int]:
        """The estimate by its parts, without those that are 0."""
        sizes = (self.kept.products, self.kept.pairs, self.kept.logits, self.passing)
        return {label: int(size) for label, size in zip(LABELS, sizes, strict=True) if size >= 1}


def estimate_activations(run: "Run", model: "Model", supplied: "Set[str]" = frozenset()) -> list[Activations]:
    """The activations of a rank at each index along the pipeline's axis (one entry without a pipeline).

    `supplied` are kinds of slots that kernels of the run fill, beside those that are filled in `model`.
    """
    estimate = _Estimate(run, model, supplied)
    stages = model.stages
    size = run.mesh.axes[stages.axis].size if stages.axis else 1
    number = max(run.micro_batch_counts())
    in_flight = stages.in_flight(number) if stages.in_flight is not None else [1.0] * size
    return [estimate.of_stage(stage, in_flight[stage]) for stage in range(size)]


@dataclass(frozen=True)
class _Unit:
    """One unit: what it keeps of a micro batch, what it keeps if it is computed again, and its largest result.

    `gathered` are the bytes of its weights that ranks gather, in the format of the run.
    `tile` is what its products of parts of the sequence hold while backward computes a part again.
    """

    whole: Kept
    again: Kept
    largest: float
    tile: float
    gathered: float = 0.0


class _Estimate:
    """Reads a model's plan, placements and slots."""

    def __init__(self, run: "Run", model: "Model", supplied: "Set[str]") -> None:
        self.run, self.model = run, model
        self.compiled = None if run.compiler is None else CompiledUnits(model, supplied)
        self.itemsize = FORMATS[run.precision.activations].bytes
        self.factor = EAGER if run.compiler is None else 1.0
        self.work: dict[str, list[Work]] = defaultdict(list)
        for one in model.plan.work or ():
            self.work[one.unit].append(one)
        self.axes = [axis for axis in run.mesh.axes.values() if axis.size > 1]
        self.last = model.plan.units[-1].name
        self.keeps_pairs, self.fuses_loss = self._of_slots()
        self.recomputed, self.moved = self._of_wraps()
        self.tiles = {
            (one.site.kind, one.site.role): wrap.tile for one in model.slots for wrap in one.wraps if wrap.tile
        }

    def _of_slots(self) -> tuple[set[str], bool]:
        """The roles of modules that keep a value for every pair of positions; whether a supplier computes the loss."""
        pairs, fused = set[str](), False
        for filled in self.model.slots:
            keeps = filled.site.declared.keeps_pairs if filled.offer is None else filled.offer.keeps_pairs
            again = any(wrap.layer >= RECOMPUTING for wrap in filled.wraps)
            if keeps and not again:
                pairs.add(filled.site.role)
            fused |= filled.site.kind == "loss" and filled.offer is not None
        return pairs, fused

    def _of_wraps(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """By role, the part of this rank's units that are computed again, and of those whose activations leave a GPU.

        Units of other stages are taken to be wrapped as those of their role here.
        """
        roles, wrapped, moved = Counter[str](), Counter[str](), Counter[str]()
        for unit in self.model.own_units:
            roles[role_of(unit.name)] += 1
        for filled in self.model.unit_wraps:
            outer = [wrap for wrap in filled.wraps if wrap.layer >= RECOMPUTING]
            wrapped[filled.site.role] += bool(outer)
            moved[filled.site.role] += any(wrap.moves for wrap in outer) and self.run.device != "cpu"
        parts = ({role: which[role] / count for role, count in roles.items()} for which in (wrapped, moved))
        return next(parts), next(parts)

    def of_stage(self, stage: int, in_flight: float) -> Activations:
        """The activations of a rank of a stage."""
        found, before, passing = Activations(in_flight=in_flight), 0.0, list[float]()
        rank = self._rank_of(stage)
        trained = self.model.trained_units()
        names = {name for chunk in self.model.stages.chunks_of(stage) for name in self.model.stages.units[chunk]}
        for unit, carried in zip(self.model.plan.units, carrying(self.model.plan.units, trained), strict=False):
            if unit.name not in names or (unit.name not in trained and carried.isdisjoint(unit.inputs)):
                continue
            one, again = self._unit(unit, rank), self.recomputed.get(role_of(unit.name), 0.0)
            found.kept.add(one.whole, in_flight * (1 - again))
            moved = self.moved.get(role_of(unit.name), 0.0)
            found.kept.add(one.again, in_flight * max(again - moved, 0.0))
            found.moved += in_flight * moved * one.again.all
            passing.append(one.tile + self._passing(one, again > 0, before))
            before = one.gathered
        # When backward reaches the units before the last one, the logits are gone.
        first = 0.0 if self.compiled is None else found.kept.logits
        found.passing = max([0.0, *(size - first for size in passing[:-1]), *passing[-1:]])
        return found

    def _passing(self, unit: _Unit, is_recomputed: bool, before: float) -> float:
        """Bytes that exist for a moment while backward is in a unit.

        `before` are the gathered weights of the unit before. Gradients of gathered weights are in the format of the run
        in the last unit, and in fp32 elsewhere. If units are compiled, the gradient of logits takes their place.
        """
        again = unit.whole.all if is_recomputed else 0.0
        if self.compiled is None:
            return unit.largest + again + (1 + AHEAD) * unit.gathered
        if unit.whole.logits:
            return 2 * unit.gathered + before
        return 2 * unit.largest + again + (1 + AHEAD) * unit.gathered + 2 * FP32 / self.itemsize * unit.gathered

    def _rank_of(self, stage: int) -> int:
        axis = self.model.stages.axis
        if not axis:
            return self.run.rank
        view = self.run.mesh.views["dense"]
        place = next(number for number, one in enumerate(view) if one.name == axis)
        return stage * prod(one.size for one in view[place + 1 :])

    def _unit(self, unit: Unit, rank: int) -> _Unit:
        tokens, squares = self._rows(unit)
        whole, again, largest, tile = Kept(), Kept(), 0.0, 0.0
        previous: Work | None = None
        for one in self.work[unit.name]:
            if not one.is_weight:
                whole.add(self._pairs(one, squares))
                whole.add(self._turned(one, tokens))
                previous = one
                continue
            placement = self.model.placement_of(one.name)
            sides = self._sides(placement, one, tokens, rank)
            if not sides:
                continue
            *out, inner = sides
            is_loss = unit.name == self.last and "vocab" in placement.parameter.axes
            wide, part = sum(out), self._part(one.name, is_loss)
            if part < 1 and not is_loss:  # what surrounds the tiles is as wide as the residual stream
                tile += part * self.itemsize * (wide + inner)
                wide, inner = min(wide, inner), min(wide, inner)
            elif part < 1:
                wide *= part
            trained = inner if placement.parameter.trainable else 0.0
            kept_input = self._input(one, previous, trained, placement) if part == 1 or is_loss else trained
            whole.add(self._product(wide, kept_input, is_loss))
            previous = one
            passing = min(EAGER_LOSS * wide, MOST_LOSS) if is_loss and self.run.compiler is None else 0.0
            largest = max(largest, self.itemsize * wide + passing)
            if not again.all:
                first = self.itemsize * inner
                again = Kept(products=first, certain=first)
        return _Unit(whole, again, largest, 2 * tile, self._gathered(unit, rank))

    def _part(self, name: str, is_loss: bool) -> float:
        """The part of a rank's positions that exists at a time inside the module of a product."""
        owner = role_of(name.rpartition(".")[0])
        sizes = [
            tile
            for (kind, role), tile in self.tiles.items()
            if (kind == "loss" if is_loss else owner.startswith(f"{role}."))
        ]
        size = min(sizes, default=0)
        ranks = prod(axis.size for axis in self.axes if TOKENS_AXIS in axis.entries)
        return min(1.0, size * ranks / self.run.config.trainer.seq_length) if size else 1.0

    def _input(self, work: "Work", previous: "Work | None", inner: float, placement: "Placement") -> float:
        """The elements of a product's input, `inner`, that the product keeps."""
        if self.compiled is None:
            return inner
        if self.compiled.keeps_whole_input(work):
            return inner * self._shared({segment.axis for segment in placement.dims[-1]})
        from_rows = self._has_experts(work) and not (previous is not None and self._has_experts(previous))
        return inner if self.compiled.keeps_input(work, previous, from_rows) else 0.0

    def _has_experts(self, work: "Work") -> bool:
        """Whether a product has a weight for each expert."""
        return work.is_weight and "expert" in self.model.placement_of(work.name).parameter.axes

    def _turned(self, work: "Work", tokens: float) -> Kept:
        """The queries and keys that compiled units keep beside the result of their projection."""
        elements = 0 if self.compiled is None else self.compiled.turned(work)
        size = self.itemsize * tokens * elements / prod(axis.size for axis in self.axes if "heads" in axis.splits)
        return Kept(products=size)

    def _gathered(self, unit: Unit, rank: int) -> float:
        """Bytes of the unit's weights that ranks gather for each pass."""
        return sum(
            self.itemsize * prod(placement.gathered_shape(rank))
            for name, placement in self.model.placements.items()
            if isinstance(placement, GatheredPlacement) and name.startswith(f"{unit.name}.")
        )

    def _product(self, out: float, inner: float, is_loss: bool) -> Kept:
        """What a product keeps: an input of `inner` elements, and its output."""
        if not is_loss:
            size = self.itemsize * (out + inner)
            return Kept(products=self.factor * size, certain=size)
        logits, hidden = self.itemsize * out, self.itemsize * inner
        return Kept(products=hidden, logits=logits, certain=hidden + (0 if self.fuses_loss else logits))

    def _rows(self, unit: Unit) -> tuple[float, float]:
        """(rows, sum of squared lengths) of a micro batch that a rank computes in a unit."""
        samples, trainer = self.run.micro_batch_size, self.run.config.trainer
        if unit.sequence == TOKENS_AXIS:
            ranks = prod(axis.size for axis in self.axes if TOKENS_AXIS in axis.entries)
            return samples * trainer.seq_length / ranks, samples * trainer.seq_length**2 / ranks
        stream = self.model.plan.streams[unit.sequence]
        ranks = prod(axis.size for axis in self.axes if axis.shares_streams)
        return samples * stream.rows / ranks, samples * stream.squares / ranks

    def _sides(self, placement: "Placement", work: "Work", tokens: float, rank: int) -> list[float]:
        """The elements of a product's operands on each side of its weight, the input last; empty if it has no sides.

        A weight of more than two dimensions is a stack of matrices, of which a token meets as many as its FLOPs say.

        A rank of sequence parallelism holds its part of the tokens where the width is whole.
        """
        local = placement.gathered_shape if isinstance(placement, GatheredPlacement) else placement.local_shape
        shape = local(rank)
        dims = list(enumerate({segment.axis for segment in segments} for segments in placement.dims))[-2:]
        logical = prod(placement.shape[number] for number, _ in dims)
        if len(dims) < 2 or not logical:
            return []
        times = max(work.flops.per_token / (6 * logical), 0.0)
        return [times * tokens * shape[number] / self._shared(names) for number, names in dims]

    def _shared(self, names: set[str]) -> int:
        """The ranks that divide the sequence of activations with these named axes."""
        sharing = [axis for axis in self.axes if TOKENS_AXIS in axis.activations and TOKENS_AXIS not in axis.entries]
        return prod(axis.size for axis in sharing if names.isdisjoint(axis.splits))

    def _pairs(self, work: "Work", squares: float) -> Kept:
        """The scores that a module keeps for all pairs of positions, and their normalised form."""
        if role_of(work.name) not in self.keeps_pairs or not work.flops.meets_pairs:
            return Kept()
        size = squares * self._heads(work.name) * self.itemsize
        return Kept(pairs=2 * size, certain=size)

    def _heads(self, module: str) -> float:
        """The heads of a module that a rank computes, as its parameters state them."""
        counts = [
            segment.count
            for name, placement in self.model.placements.items()
            if name.startswith(f"{module}.")
            for segments in placement.dims
            for segment in segments
            if segment.axis == "heads"
        ]
        ranks = prod(axis.size for axis in self.axes if "heads" in axis.splits)
        return ceil(max(counts, default=1) / ranks)
