"""Gathers weights around the calls of units, and sums gradients while backward runs.

Before a unit computes, its weights are gathered, and the gathering of the next units has started: in forward, and in
the reverse order in backward. When backward has left a unit, its gradients are summed while backward computes the unit
before it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import WeightExchange, rounding_of_sums
from mplug_fsdp.copies import Place, Rows
from mplug_fsdp.gathered import Formats, Gathered, Peers
from mplug_fsdp.peer_rows import PeerRows, require_copies
from mplug_fsdp.peer_sums import PeerSums
from mplug_ops.lanes import Lane
from mplug_products import GatheredCopies, gathered_copies
from mplug_sharding import GatheredPlacement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug import Model, Run
    from mplug_fsdp.config import FSDPConfig

IN_FLIGHT = 2
"""When the gradients of a unit get memory, at most IN_FLIGHT - 1 other sums are in flight; more would cost memory."""


def shard_units(run: "Run", model: "Model", group: "ProcessGroup", config: "FSDPConfig") -> None:
    """Let this rank's units compute with parameters that are gathered for each call."""
    device = torch.device(run.device)
    lane, of, places = Lane(device), dict[str, Gathered](), _places(model)
    copies, peers = gathered_copies(run, model), _peers(run, group, lane, config)
    names = {id(parameter): name for name, parameter in model.parameters().items()}
    held = {unit.name: _gathered_in(model, unit.name, names) for unit in model.own_units}
    last = model.plan.units[-1].name
    elsewhere = {name for unit, own in held.items() if unit != last for name in own}
    for together in _joined(held.values()):
        items = ops.in_order((ops.Item(name, ()) for name in together), model.placements)
        rows = [_rows(run, model, one.name, places, copies.get(one.name)) for one in items]
        is_last_alone = elsewhere.isdisjoint(together)
        of |= dict.fromkeys(together, Gathered(rows, group, lane, _formats(run, config, is_last_alone), device, peers))
    order = {unit: of[own[0]] for unit, own in held.items() if own}
    schedule = Schedule([*order.values()], config.prefetch, config.reshard_after_forward, _last(model, [*order]))
    for name, method in dict.fromkeys((one.name, one.method) for one in (*model.own_units, *model.plan.inference)):
        if name in order:
            part = model.module.get_submodule(name)
            setattr(part, method, schedule.around(getattr(part, method), [*order].index(name)))
    numbers = {name: number for number, name in enumerate(order)}
    around = partial(_gathering, schedule, numbers)
    model.exchanges.append(WeightExchange(begin=schedule.forget, wait=None, held=schedule.held, around=around))


def _gathering(
    schedule: "Schedule", numbers: dict[str, int], unit: str, call: Callable[..., Any]
) -> Callable[..., Any]:
    """The call of a unit, with its weights; a unit without sharded weights is called as it is."""
    return schedule.around(call, numbers[unit]) if unit in numbers else call


def _peers(run: "Run", group: "ProcessGroup", lane: Lane, config: "FSDPConfig") -> Peers:
    """The memories of the transports that are copies. Collective."""
    by_copies = [one == "copy_engines" for one in (config.transport, config.sum_transport)]
    if any(by_copies):
        require_copies(run, group)
    return Peers(
        PeerRows(group, lane, torch.device(run.device)) if by_copies[0] else None,
        PeerSums(group, lane) if by_copies[1] else None,
    )


def _formats(run: "Run", config: "FSDPConfig", is_last_alone: bool) -> Formats:
    """Products add to gradients in the masters' precision, and in the weights' precision in the model's last unit.

    Memory is at its peak when backward enters the last unit, and these gradients have half the size there. If it shares
    a parameter with another unit, such as a tied embedding, several products are added, in the masters' precision.
    """
    weights, masters = run.precision.weight_dtype, run.precision.master_dtype
    is_exact = rounding_of_sums(config.reduce_dtype) is None
    sums = masters if is_exact else run.precision.sum_dtype(config.reduce_dtype)
    return Formats(weights, weights if is_last_alone else masters, sums)


def _gathered_in(model: "Model", unit: str, names: dict[int, str]) -> list[str]:
    own = [names[id(parameter)] for parameter in model.module.get_submodule(unit).parameters()]
    return [name for name in own if isinstance(model.placements[name], GatheredPlacement)]


def _joined(held: Iterable[list[str]]) -> list[list[str]]:
    """The parameters of units; those of units that share one form one list, because it is gathered once for all."""
    joined: list[list[str]] = []
    for own in held:
        sharing = [names for names in joined if not set(names).isdisjoint(own)]
        joined = [names for names in joined if names not in sharing]
        joined.append(list(dict.fromkeys(chain(*sharing, own))))
    return [names for names in joined if names]


def _places(model: "Model") -> dict[int, list[Place]]:
    """Where modules hold each parameter, by its `id`."""
    places = defaultdict[int, list[Place]](list)
    for part in model.module.modules():
        for attribute, held in part._parameters.items():
            places[id(held)].append(Place(part._parameters, attribute))
    return places


def _rows(
    run: "Run", model: "Model", name: str, places: dict[int, list[Place]], copies: GatheredCopies | str | None
) -> Rows:
    """This rank's rows of a parameter; those in CPU memory are pinned, so that they can be copied asynchronously."""
    placement, values = model.placements[name], model.parameters()[name]
    assert isinstance(placement, GatheredPlacement)
    if placement.offloaded and run.device.startswith("cuda"):
        values.data = values.data.pin_memory()
    own = copies if isinstance(copies, GatheredCopies) else None
    return Rows(name, values, placement.gathered_shape(run.rank), model.sinks.get(name), places[id(values)], own)


def _last(model: "Model", units: list[str]) -> int | None:
    """The number of the unit whose backward directly follows its forward; None if another rank has it."""
    return units.index(model.plan.units[-1].name) if model.plan.units[-1].name in units else None


class Schedule:
    """The units of a rank by number, in the order of forward, and their backward passes.

    Units that share a parameter have the same `Gathered`. `ahead` is the number of units that are gathered before their
    turn. `frees` says whether a unit's weights are freed between forward and backward; those of unit `last` never are.
    """

    def __init__(self, units: list[Gathered], ahead: int, frees: bool, last: int | None) -> None:
        self.units, self.ahead, self.frees, self.last = units, ahead, frees, last
        self._entered = dict[int, None]()
        self._is_passing = self._is_held = False
        self._under_way = deque[Gathered]()

    def around(self, inner: Callable[..., Any], number: int) -> Callable[..., Any]:
        """A unit's call, with the weights of the unit."""
        unit = self.units[number]

        @wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            with ops.waiting():
                unit.gather()
                unit.wait()
                for following in self.units[number + 1 : number + 1 + self.ahead]:
                    following.gather()
            given = self._watched(number, [*arguments, *named.values()])
            outputs = inner(*given[: len(arguments)], **dict(zip(named, given[len(arguments) :], strict=True)))
            learning = [one for one in _as_tuple(outputs) if isinstance(one, Tensor) and one.requires_grad]
            for output in learning:
                output.register_hook(lambda _: self._enter(number))
            if not self._is_held and (not learning or (self.frees and number != self.last)):
                unit.free()
            return outputs

        return call

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block, the weights of all units are here, for passes without gradients."""
        self._is_held = True
        try:
            for unit in self.units:
                unit.gather()
            for unit in self.units:
                unit.wait()
            yield
        finally:
            self._is_held = False
            for unit in self.units:
                unit.free()

    def forget(self) -> None:
        """Free all weights, because this rank's rows have new values."""
        for unit in self.units:
            unit.forget()

    def _watched(self, number: int, given: list[Any]) -> list[Any]:
        """The arguments of a unit's call; when backward has computed their gradients, it has left the unit."""
        places = [at for at, one in enumerate(given) if isinstance(one, Tensor) and one.requires_grad]
        if places and torch.is_grad_enabled():
            tensors = (given[at] for at in places)
            watched = _Watch.apply(partial(self._leave, number), *tensors)  # type: ignore[no-untyped-call]
            for at, tensor in zip(places, watched, strict=True):
                given[at] = tensor
        return given

    def _enter(self, number: int) -> None:
        """Backward reaches a unit: its weights and memory for its gradients are needed."""
        unit = self.units[number]
        if not self._is_passing:
            self._is_passing = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._entered[number] = None
        unit.gather()
        unit.wait()
        if not unit.collects:
            self._settle(IN_FLIGHT - 1)
            unit.collect()
        for previous in reversed(self.units[max(0, number - self.ahead) : number]):
            previous.gather()

    def _leave(self, number: int) -> None:
        """Backward has left a unit; the gradients of units that share a parameter are complete after the first unit."""
        self._entered.pop(number, None)
        self.units[number].free()
        if self.units.index(self.units[number]) == number:
            self._sum(self.units[number])

    def _sum(self, unit: Gathered) -> None:
        if unit.collects:
            unit.sum()
            self._under_way.append(unit)

    def _settle(self, but: int) -> None:
        """Let the current stream wait for all sums except the newest `but`, and free their gradients."""
        while len(self._under_way) > but:
            self._under_way.popleft().release()

    def _end_pass(self) -> None:
        """At the end of a backward pass, leave the units whose arguments have no gradient."""
        for number in [*self._entered]:
            self._leave(number)
        for unit in reversed(self.units):
            self._sum(unit)
        self._settle(0)
        self._is_passing = False


class _Watch(torch.autograd.Function):
    """The identity of several tensors; calls `left` when backward has computed the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.left = left
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.left()
        return (None, *gradients)


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
