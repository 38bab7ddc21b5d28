"""The predicted seconds of a step: passes of a rank or a pipeline, sums of gradients, gathered weights, the update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mplug.commands import IN_CPU_MEMORY
from mplug_plan.groups import group_of, is_near
from mplug_plan.matrices import orthogonalising
from mplug_plan.unit_costs import Costs, Seconds, UnitCost
from mplug_schedules import Costs as PassCosts
from mplug_schedules import Table, Timeline, shape_of, timeline

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_plan.kernels import Kernels
    from mplug_plan.machine import Machine

TAKEN = 32 / 132
"""The part of a GPU that a collective takes from the computation beside it: NCCL's channels on NVLink, of an H100's
multiprocessors."""
MOST_DRAWN = 4096
"""Micro batches of all stages that a timeline has, at most."""
MOST_ROUNDS = 3
"""Rounds of micro batches (one for each stage) that are simulated; further ones take as long as the last."""
IDLE = 9e-7
"""Seconds in which a kernel begins and ends (`mplug bench --limits`: an empty kernel in a CUDA graph)."""
KERNELS = 40
"""Kernels of a unit forward; backward has twice as many."""


@dataclass(frozen=True)
class Pass:
    """The passes of one micro batch in one chunk, in seconds."""

    forward: float
    input_half: float
    weight_half: float
    parts: Seconds

    @property
    def backward(self) -> float:
        """The whole backward pass."""
        return self.input_half + self.weight_half


@dataclass(frozen=True)
class Step:
    """A predicted step: its seconds by part. `parts` add up to `seconds`; `hidden` are collectives beside products."""

    seconds: float
    parts: dict[str, float]
    hidden: float
    chunks: tuple[Pass, ...]
    tables: Callable[[int], Table] | None = None
    micro_batches: int = 1
    transfer: float = 0.0
    tail: dict[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of stages of the pipeline."""
        return 1 if self.tables is None else len(self.tables(1).rows)

    @property
    def drawn(self) -> int:
        """The number of micro batches that a timeline has: all, unless they are many."""
        return min(self.micro_batches, max(MOST_DRAWN // self.ranks, MOST_ROUNDS * self.ranks))

    def timeline(self) -> Timeline | None:
        """The times of the pipeline's table for `drawn` micro batches; None without a pipeline."""
        return (
            None if self.tables is None else timeline(self.tables(self.drawn), pass_costs(self.chunks, self.transfer))
        )


def predict(run: "Run", model: "Model", machine: "Machine", kernels: "Kernels", held: dict[str, int]) -> Step:
    """The step of a run. `held` are the bytes of a rank between steps."""
    if machine.power is not None:
        chunks, _ = _passes(run, model, machine, kernels)
        parts = _parts(chunks, model, max(run.micro_batch_counts()))
        memory = parts["norms, activations, loss"] + _update(run, model, machine, held)
        machine = machine.at(machine.power.clock(parts["products"], parts["attention"], memory))
    return _at_own_clock(run, model, machine, kernels, held)


def _passes(run: "Run", model: "Model", machine: "Machine", kernels: "Kernels") -> tuple[list[Pass], float]:
    """The passes of each chunk, and the seconds of gathered weights that a micro batch hides."""
    units = Costs(run, model, machine, kernels).units()
    made = [_pass([units[name] for name in names], machine) for names in model.stages.units]
    return [one for one, _ in made], sum(hidden for _, hidden in made) / max(len(made), 1)


def _at_own_clock(run: "Run", model: "Model", machine: "Machine", kernels: "Kernels", held: dict[str, int]) -> Step:
    """The step, if each part runs at the clock at which it was measured alone."""
    micro_batches = max(run.micro_batch_counts())
    chunks, gathering = _passes(run, model, machine, kernels)
    transfer = 0.0
    if model.stages.table is not None:
        transfer = _transfer(run, model, machine)
        computing, busiest = _pipelined(model, chunks, transfer, micro_batches)
        busy = busiest * micro_batches
    else:
        computing = busy = micro_batches * sum(one.forward + one.backward for one in chunks)
    last = chunks[0]
    exposed, sums = _sums(run, model, machine, last, micro_batches)
    hidden = micro_batches * gathering + sums - exposed
    update = _update(run, model, machine, held)
    slowed = TAKEN * hidden
    parts = _parts(chunks, model, micro_batches)
    found = {
        **parts,
        "bubble": computing - busy,
        "gradients and weights between ranks": exposed + slowed,
        "update": update,
    }
    seconds = sum(found.values())
    tail = {"sum of gradients, exposed": exposed + slowed, "update": update}
    return Step(seconds, found, hidden, tuple(chunks), _tables(model), micro_batches, transfer, tail)


def _tables(model: "Model") -> Callable[[int], Table] | None:
    """The tables of the model's pipeline by the number of micro batches; None without a pipeline."""
    make = model.stages.table
    if make is None:
        return None

    def table(number: int) -> Table:
        found = make(number)
        assert isinstance(found, Table), "the strategy pp returns tables of mplug_schedules"
        return found

    return table


def pass_costs(chunks: Sequence[Pass], transfer: float) -> list[PassCosts]:
    """The costs of chunks as a pipeline's timeline takes them."""
    return [PassCosts(one.forward, one.input_half, one.weight_half, transfer) for one in chunks]


def _pass(units: Sequence[UnitCost], machine: "Machine") -> tuple[Pass, float]:
    """The passes of consecutive units, and the seconds of collectives that these hide (gathered weights)."""
    parts, forward, input_half, weight_half, hidden = Seconds(), 0.0, 0.0, 0.0, 0.0
    for number, unit in enumerate(units):
        seconds, idle = unit.seconds, IDLE * KERNELS
        parts.add(seconds)
        again = unit.again * seconds.forward
        parts.add(seconds.forward_times(unit.again))
        computed = seconds.forward, seconds.backward + again
        waits = [0.0, 0.0]
        if unit.group is not None:
            size, near = unit.group
            gather = machine.collective(unit.gathered, size, near)
            reduce = machine.collective(2 * unit.gathered, size, near)  # in fp32
            for direction, needed in ((0, gather), (1, gather + reduce)):
                # The weights of the first unit of a pass arrive before anything computes.
                waits[direction] = needed if number == 0 else max(needed - computed[direction], 0.0)
                hidden += needed - waits[direction]
            parts.add(Seconds(collectives=waits[0], collectives_backward=waits[1]))
        forward += computed[0] + waits[0] + idle
        input_half += seconds.input_half + again + waits[1] + 2 * idle
        weight_half += seconds.weight_gradients
    return Pass(forward, input_half, weight_half, parts), hidden


def _busy(chunks: Sequence[Pass], own: Sequence[int]) -> float:
    return sum(chunks[chunk].forward + chunks[chunk].backward for chunk in own)


def _pipelined(model: "Model", chunks: Sequence[Pass], transfer: float, number: int) -> tuple[float, float]:
    """(seconds of the passes of a step in a pipeline, seconds of a micro batch on its busiest rank)."""
    tables = _tables(model)
    assert tables is not None
    ranks = len({model.stages.rank_of(chunk) for chunk in range(len(chunks))})
    simulated = number if number <= MOST_ROUNDS * ranks else MOST_ROUNDS * ranks + number % ranks
    costs = pass_costs(chunks, transfer)
    length = timeline(tables(simulated), costs).length
    busiest = max(_busy(chunks, tables(simulated).chunks_of(rank)) for rank in range(ranks))
    if simulated < number:
        steady = (length - timeline(tables(simulated - ranks), costs).length) / ranks
        length += (number - simulated) * max(steady, busiest)
    return length, busiest


def _transfer(run: "Run", model: "Model", machine: "Machine") -> float:
    """Seconds in which the activations of a micro batch travel to the next stage."""
    size, dtype = 0.0, run.precision.activation_dtype.itemsize
    for name in model.crossing(1) if len(model.stages.units) > 1 else ():
        shape = shape_of(run, model, name)
        elements = 1.0
        for length in shape or (0,):
            elements *= length
        size += dtype * elements
    return machine.transfer(size, is_near(run.mesh, model.stages.axis, machine))


def _sums(run: "Run", model: "Model", machine: "Machine", chunk: Pass, micro_batches: int) -> tuple[float, float]:
    """(exposed, all) seconds of the sums of gradients over ranks that read other data, and of weights gathered once.

    They run beside the backward pass of the last micro batch and the forward pass of the first one. What belongs to the
    model's first unit is ready last, and needed first.
    """
    weight, fp32 = run.precision.weight_dtype.itemsize, 4
    backward = forward = tail = every = waiting = 0.0
    first = model.plan.units[0].name
    sharding = model.sharding
    sharded = {name: bucket for bucket in (sharding.buckets if sharding else ()) for name in bucket.names}
    own = {name for chunk_units in [model.own_units] for unit in chunk_units for name in _names_in(model, unit.name)}
    by_axes: dict[tuple[tuple[str, ...], bool, bool], float] = {}
    for name in own:
        placement = model.placements[name]
        axes = tuple(axis for axis in placement.data_axes if run.mesh.axes[axis].size > 1)
        if not axes or not placement.parameter.trainable:
            continue
        elements = 1.0
        for length in placement.local_shape(run.rank):
            elements *= length
        key = (axes, name in sharded, name.startswith(f"{first}."))
        by_axes[key] = by_axes.get(key, 0.0) + elements
    for (axes, is_sharded, is_first), elements in by_axes.items():
        group = group_of(run.mesh, axes, machine)
        summed = machine.collective(fp32 * elements, *group)
        gathered = machine.collective(weight * elements, *group) if is_sharded else summed
        if is_sharded:
            # Stage 2 sums gradients in every micro batch, beside its backward pass.
            times = micro_batches if sharding is not None and sharding.transient else 1
            every += (times - 1) * summed
            waiting += (times - 1) * max(summed - 0.9 * chunk.backward, 0.0)
            backward, forward = backward + summed, forward + gathered
        else:
            backward += summed + gathered  # an all-reduce is both
        if is_first:
            tail += summed + gathered
    if not beside_backward(run):
        return backward + forward + every, backward + forward + every
    exposed = tail + max(backward - 0.9 * chunk.backward, 0.0) + max(forward - 0.9 * chunk.forward, 0.0)
    exposed = min(exposed, backward + forward) + waiting
    return exposed, backward + forward + every


def beside_backward(run: "Run") -> bool:
    """Whether a strategy of data parallelism sums gradients while backward runs; the host sums them at its end."""
    return not {"dp", "zero", "fsdp"}.isdisjoint(run.config.parallel.degrees)


def _names_in(model: "Model", unit: str) -> list[str]:
    return [name for name in model.placements if name.startswith(f"{unit}.")]


def _update(run: "Run", model: "Model", machine: "Machine", held: dict[str, int]) -> float:
    """Seconds of an update: masters and states are read and written, weights written, gradients read.

    Clipping reads gradients once more, for their norm. States in the memory of the CPU travel to the GPU and back, in
    both directions at once. An optimizer of whole matrices multiplies them too.
    """
    weights, state = held.get("weights", 0), held.get("optimizer state", 0)
    masters = 2 * held["masters"] + weights if "masters" in held else 2 * weights
    moving = (masters + 2 * state + 2 * held.get("gradients", 0)) / machine.copy_rate
    far = held.get(IN_CPU_MEMORY, 0) / machine.cpu_rate
    return max(moving, far) + orthogonalising(run, model, machine)


def _parts(chunks: Sequence[Pass], model: "Model", micro_batches: int) -> dict[str, float]:
    """The seconds of the busiest rank, by class."""
    ranks = {model.stages.rank_of(chunk) for chunk in range(len(chunks))} if model.stages.axis else {0}
    own = {
        rank: [c for c in range(len(chunks)) if not model.stages.axis or model.stages.rank_of(c) == rank]
        for rank in ranks
    }
    busiest = max(own.values(), key=lambda members: _busy(chunks, members))
    total, all_of = Seconds(), _busy(chunks, busiest)
    for chunk in busiest:
        total.add(chunks[chunk].parts)
    products = total.products + total.input_gradients + total.weight_gradients
    attention = total.attention + total.attention_backward
    others = total.others + total.others_backward
    collectives = total.collectives + total.collectives_backward
    found = {
        "products": products,
        "attention": attention,
        "norms, activations, loss": others,
        "collectives that products wait for": collectives,
    }
    found["gaps"] = max(all_of - sum(found.values()), 0.0)
    return {name: micro_batches * seconds for name, seconds in found.items()}
