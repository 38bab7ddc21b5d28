"""Find the fastest layouts of a model on a number of GPUs: enumerate, rank by a rough estimate, build the best ones.

A rough estimate orders the layouts; the host builds the best of them, and refuses what cannot run; only then are bytes
and seconds predicted. So a plan for 16,384 GPUs takes seconds, and its rules about layouts are those of the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mplug import UsageError
from mplug_plan.planned import Built, Planned, Planner, refusal

if TYPE_CHECKING:
    from mplug import Model, Run

MOST_MICRO_BATCH = 16
MOST_BUILT = 20
"""Layouts that the host builds, at most."""
SLOWER = 1.4
"""No layout is built whose rough estimate is this many times that of the fastest that fits."""
SCHEDULES: tuple[tuple[str, ...], ...] = (
    ("parallel.pp.schedule=interleaved", "parallel.pp.chunks=2"),
    ("parallel.pp.schedule=interleaved", "parallel.pp.chunks=4"),
    ("parallel.pp.schedule=zb-h1",),
    ("parallel.pp.schedule=zb-v",),
)
"""Schedules that are tried for the best layouts with a pipeline, beside the default."""
MOST_CHUNKS = 4
"""Chunks of a rank in these schedules, at most."""
EXPOSED = 0.16
"""The part of the collectives of tensor parallelism that products do not hide, in the rough estimate."""
BEST = 3
"""The number of layouts for which these schedules are tried."""
LONG = 16384
"""No layout divides the sequence of entries below this length: tensor parallelism divides it too."""
NEAR = 1.25
"""Layouts count as too large only beyond this multiple of the memory by the rough estimate."""


class Degrees(NamedTuple):
    """The degrees of a layout; `copies` x `shards` ranks read different samples, and `form` shards states."""

    tp: int
    cp: int
    pp: int
    ep: int
    copies: int
    shards: int
    form: str

    @property
    def word(self) -> str:
        """The value of --parallel."""
        parts = (("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("ep", self.ep), ("dp", self.copies))
        strategy = {"zero2": "zero"}.get(self.form, self.form)
        return "".join(f"{name}{size}" for name, size in (*parts, (strategy, self.shards)) if size > 1)

    @property
    def assignments(self) -> tuple[str, ...]:
        """Further settings of the layout."""
        return ("parallel.zero.stage=2",) if self.form == "zero2" and self.shards > 1 else ()


@dataclass
class Search:
    """What a search has found: runs that fit, the fastest first, and why others are left out."""

    fitting: list[Planned] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    too_large: dict[str, float] = field(default_factory=dict)
    not_built: int = 0
    considered: int = 0


def search(planner: Planner, report: Callable[[str], None] = lambda _: None) -> Search:
    """Search all layouts of the planner's GPUs; the layout of the settings alone, if there is one.

    `report` receives what is under way.
    """
    found = Search()
    if planner.value("parallel", "layout"):
        word = planner.value("parallel", "layout")
        found.considered = 1
        _evaluate(planner, planner.built(word), found)
        _schedules(planner, found)
        return found
    rough = Rough(planner)
    ranked = sorted(((rough.seconds(one), one) for one in _degrees(planner, rough)), key=lambda pair: pair[0])
    found.considered = len(ranked)
    built, fastest = 0, 0.0
    for number, (seconds, one) in enumerate(ranked):
        if rough.bytes(one) > NEAR * planner.limit:
            found.too_large[one.word or "one process"] = rough.bytes(one)
            continue
        fastest = fastest or (seconds if found.fitting else 0.0)
        if built >= MOST_BUILT or (fastest and seconds > SLOWER * fastest):
            found.not_built = len(ranked) - number
            break
        report(f"{one.word or 'one process'}, layout {number + 1} of {len(ranked)}")
        try:
            _evaluate(planner, planner.built(one.word, one.assignments), found)
        except UsageError as error:
            found.refused[one.word or "one process"] = refusal(error)
            continue
        built += 1
    report("schedules of the best layouts")
    _schedules(planner, found)
    found.fitting.sort(key=lambda one: one.seconds)
    return found


def _evaluate(planner: Planner, built: Built, found: Search, more: tuple[str, ...] = ()) -> None:
    """Add the fastest fitting run of a layout: with larger micro batches, and with recomputation if needed."""
    candidates = [one for one in _sized(planner, built) if one.memory <= planner.limit]
    smallest = None
    if not candidates and not planner.is_set("memory", "recompute", "mode"):
        again = planner.built(built.layout, (*built.assignments, "memory.recompute.mode=full"))
        for one in _sized(planner, again):
            smallest = one.memory if smallest is None else min(smallest, one.memory)
            candidates += [one] if one.memory <= planner.limit else []
    if candidates:
        found.fitting.append(min(candidates, key=lambda one: one.seconds))
    else:
        found.too_large[built.layout or "one process"] = smallest or built.planned().memory


def _sized(planner: Planner, built: Built) -> Iterator[Planned]:
    """The run with micro batches of 1, 2, 4 ... samples, until one does not fit or a pipeline lacks micro batches."""
    if planner.is_set("trainer", "micro_batch_size") and planner.value("trainer", "micro_batch_size"):
        yield built.planned()
        return
    _, shards = built.run.mesh.batch_shard(0)
    samples = built.run.config.trainer.global_batch_size // shards
    stages = built.run.mesh.axes[built.model.stages.axis].size if built.model.stages.axis else 1
    size = 1
    while size <= min(samples, MOST_MICRO_BATCH) and not samples % size and (size == 1 or samples // size >= stages):
        one = built.planned(size)
        yield one
        if one.memory > planner.limit:
            return
        size *= 2


def _schedules(planner: Planner, found: Search) -> None:
    """Replace the best runs with a pipeline by faster schedules of them."""
    if planner.is_set("parallel", "pp", "schedule"):
        return
    found.fitting.sort(key=lambda one: one.seconds)
    for number, one in enumerate(found.fitting[:BEST]):
        if one.step.tables is None:
            continue
        for words in SCHEDULES:
            try:
                other = planner.built(one.layout, (*one.assignments, *words)).planned()
            except UsageError as error:
                found.refused[f"{one.layout} with {words[0].rpartition('=')[2]}"] = refusal(error)
                continue
            if other.memory <= planner.limit and other.seconds < found.fitting[number].seconds:
                found.fitting[number] = other


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _degrees(planner: Planner, rough: "Rough") -> Iterator[Degrees]:
    """All combinations of degrees whose product is the number of GPUs; tensor parallelism stays within a node."""
    gpus, node = planner.gpus or 1, planner.machine.gpus_per_node
    sequences = _powers(64) if rough.length >= LONG else iter((1,))
    for cp in list(sequences):
        for tp in _powers(node):
            for pp in _powers(rough.layers):
                if gpus % (tp * cp * pp):
                    continue
                data = gpus // (tp * cp * pp)
                if rough.samples % data:
                    continue
                for ep in _powers(min(rough.experts, tp * cp * data)) if rough.experts else (1,):
                    yield from _forms(tp, cp, pp, ep, data, node)


def _forms(tp: int, cp: int, pp: int, ep: int, data: int, node: int) -> Iterator[Degrees]:
    """The ways to divide states over ranks that read different samples: over all of them, or over those of a node."""
    if data == 1:
        yield Degrees(tp, cp, pp, ep, 1, 1, "dp")
        return
    yield Degrees(tp, cp, pp, ep, data, 1, "dp")
    inside = max(node // (tp * cp), 1)
    for form in ("zero", "zero2", "fsdp"):
        yield Degrees(tp, cp, pp, ep, 1, data, form)
        if 1 < inside < data and not data % inside and form != "zero2":
            yield Degrees(tp, cp, pp, ep, data // inside, inside, form)


class Rough:
    """A rough estimate of a layout's seconds and bytes, from the model as one process builds it."""

    def __init__(self, planner: Planner) -> None:
        built = planner.alone()
        self.planner = planner
        run: Run = built.run
        model: Model = built.model
        self.length, self.samples = run.config.trainer.seq_length, run.config.trainer.global_batch_size
        blocks = [unit.name for unit in model.plan.units if unit.name.rpartition(".")[2].isdigit()]
        self.layers = max(len(blocks), 1)
        sizes = {name: placement.numel for name, placement in model.placements.items()}
        experts = {
            name: placement for name, placement in model.placements.items() if "expert" in placement.parameter.axes
        }
        self.of_experts = sum(placement.numel for placement in experts.values())
        self.experts = max((max(placement.shape[:1]) for placement in experts.values()), default=0)
        self.of_blocks = sum(size for name, size in sizes.items() if name.startswith(tuple(f"{b}." for b in blocks)))
        self.others = sum(sizes.values()) - self.of_blocks
        self.width = max(placement.shape[-1] for placement in model.placements.values() if len(placement.shape) == 1)
        one = built.planned(exact=True)
        self.one = one
        planner.state_bytes = one.held.get("optimizer state", 0) / max(sum(sizes.values()), 1)
        self.kept = sum(one.activations.values())
        self.itemsize = run.precision.weight_dtype.itemsize

    def elements(self, one: Degrees) -> float:
        """Elements of a rank's weights before states are sharded: of the first or the last stage."""
        dense = (self.of_blocks - self.of_experts) / one.pp / one.tp
        sparse = self.of_experts / one.pp / max(one.ep, 1) / (one.tp if one.ep == 1 else 1)
        return dense + sparse + self.others / (2 if one.pp > 1 else 1) / one.tp

    def bytes(self, one: Degrees) -> float:
        """The bytes of a rank with recomputation: a lower bound, roughly."""
        elements, shards = self.elements(one), one.shards
        whole = {"dp": 18.0, "zero": 6.0, "zero2": 2.0, "fsdp": 0.0}[one.form]
        return elements * (whole + (18.0 - whole) / shards) + self._inputs(one)

    def _inputs(self, one: Degrees) -> float:
        """Bytes of the inputs of blocks, which recomputation keeps, of the micro batches in flight."""
        tokens = self.length / (one.tp * one.cp)
        batches = min(one.pp, max(self.samples // (one.copies * one.shards), 1))
        return 2 * tokens * self.width * self.layers / one.pp * batches

    def seconds(self, one: Degrees) -> float:
        """Seconds of a step."""
        machine, gpus = self.planner.machine, self.planner.gpus or 1
        data = one.copies * one.shards
        number = max(self.samples // data, 1)
        computing = self.one.flops / gpus / (0.85 * machine.product_rate)
        chunks = min(MOST_CHUNKS, max(self.layers // one.pp, 1))  # an interleaved schedule divides the bubble
        bubble = computing * (one.pp - 1) / number / chunks
        tokens = number * self.length / one.cp
        whole = 2 * tokens * self.width
        tensor = 8 * self.layers / one.pp * machine.collective(whole, one.tp, machine.gpus_per_node)
        inside = max(machine.gpus_per_node // (one.tp * one.cp), 1)
        elements = self.elements(one)
        times = number if one.form == "fsdp" else 1
        moved = times * machine.collective(8 * elements, data, min(inside, data))
        exposed = max(moved - (0.6 * computing if one.form == "fsdp" else 0.6 * computing / number), 0.1 * moved)
        rows = 0.0
        if one.ep > 1:
            rows = 8 * self.layers / one.pp * machine.collective(whole, one.ep, min(inside, one.ep))
        sequence = 4 * self.layers / one.pp * machine.collective(whole, one.cp, machine.gpus_per_node) / 4
        update = 30 * elements / (one.shards if one.form != "dp" else 1) / machine.copy_rate
        needed = self.bytes(one)
        # Without room for activations, blocks are computed again.
        room = self.planner.limit - needed
        kept = self.kept / (one.tp * one.cp * one.pp) * min(one.pp, number)
        again = 0.33 * computing if room < kept else 0.0
        return computing + bubble + EXPOSED * tensor + exposed + rows + sequence + update + again
