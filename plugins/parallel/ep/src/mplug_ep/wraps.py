"""What expert parallelism puts around dispatch and combine, from the outside in.

N tokens of a rank, D embed, k chosen by a token, E experts, R ranks of ep, e = E / R experts of each, T ranks of etp, C
ranks that have the same tokens (tensor parallelism without sequence parallelism).

layer              before dispatch                            after combine
copies             this rank's part: [N, D] -> [N/C, D]       the parts joined
etp                tokens gathered: [N, D] -> [T N, D]        partial results summed, this rank's tokens kept
ep, all_gather     tokens gathered: [N, D] -> [R N, D],       the same
                   choices of others' experts dropped
ep, all_to_all     after it: rows to the ranks of their       before it: rows back to where they came from
                   experts, [N k, D] -> [M, D]

Each half is the other's dual, so backward is right by itself. What is inside, whoever supplies it, sorts the tokens of
one rank by expert, and so by (rank, expert), once.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mplug import Model, Run, Site, Wrap, ops
from mplug_ep.fit import copying_axes

COPIES, ETP, EP = 120, 100, 50
"""Layers: who divides weights sees tokens as the weights make them, whoever moves them is inside."""

USE = "experts"
"""Groups of their own: backward waits for tokens, and they must not wait for the sum of gradients."""

Dispatched = tuple[Tensor, Tensor, tuple[Tensor, ...]]
Dispatch = Callable[[Tensor, Tensor, int], Dispatched]
Combine = Callable[[Tensor, Tensor, tuple[Tensor, ...]], Tensor]


def wraps_of_ep(run: Run, model: Model, how: str) -> list[Wrap]:
    """The wraps of expert parallelism, and of whoever has copies of tokens where there is no etp."""
    if run.mesh.axes["ep"].size == 1:
        return []
    group = run.group("ep", use=USE)
    divided = _divided(model, "ep")
    if how == "all_gather":
        size, index = run.mesh.axes["ep"].size, run.mesh.index(run.rank, "ep")
        pair: tuple[Any, Any] = _gathering(group, size, index)
    else:
        pair = _travelling(group)
    etp = run.mesh.axes.get("etp")
    outer = [] if etp is not None and etp.size > 1 else _own_part(run, divided)
    return [*_around(pair, EP, divided), *outer]


def wraps_of_etp(run: Run, model: Model) -> list[Wrap]:
    """The wraps of expert tensor parallelism, and of whoever has copies of tokens."""
    if run.mesh.axes["etp"].size == 1:
        return []
    divided = _divided(model, "etp")
    return [*_around(_gathering(run.group("etp", use=USE)), ETP, divided), *_own_part(run, divided)]


def _around(pair: tuple[Any, Any], layer: int, divided: Callable[[Site, Run], bool]) -> list[Wrap]:
    slots = ("Experts.dispatch", "Experts.combine")
    return [Wrap(slot, wrap, layer, supports=divided) for slot, wrap in zip(slots, pair, strict=True)]


def _divided(model: Model, axis: str) -> Callable[[Site, Run], bool]:
    """Whether a site's experts are divided along an axis."""

    def supports(site: Site, run: Run) -> bool:
        own = (where for name, where in model.placements.items() if name.startswith(f"{site.name}."))
        return any(axis in placement.splits.values() for placement in own)

    return supports


def _own_part(run: Run, divided: Callable[[Site, Run], bool]) -> list[Wrap]:
    """Ranks that have the same tokens divide them among themselves."""
    axes = copying_axes(run.mesh)
    if not axes:
        return []
    group = run.group(*axes, use=USE)

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
            return inner(ops.split(x, group, 0), ops.own_part(chosen, group, 0), num_experts)

        return dispatch

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: tuple[Tensor, ...]) -> Tensor:
            return ops.join(inner(rows, ops.split(gates, group, 0), route), group, 0)

        return combine

    return _around((around_dispatch, around_combine), COPIES, divided)


def _gathering(group: ops.Group, size: int = 1, index: int = 0) -> tuple[Any, Any]:
    """All tokens to all ranks, of which this one, the `index`-th of `size`, has its part of the experts."""

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
            each = num_experts // size
            chosen = ops.all_gather(chosen, group, 0) - index * each
            held = (chosen >= 0) & (chosen < each)
            rows, counts, route = inner(ops.gather(x, group, 0), chosen.where(held, each), each)
            return rows, counts, (*route, held)

        return dispatch

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: tuple[Tensor, ...]) -> Tensor:
            *route_inside, held = route
            gates = ops.gather(gates, group, 0).where(held, 0)
            return ops.scatter(inner(rows, gates, tuple(route_inside)), group, 0)

        return combine

    return around_dispatch, around_combine


def _travelling(group: ops.Group) -> tuple[Any, Any]:
    """Each row to the rank that has its expert, and back."""

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
            rows, counts, route = inner(x, chosen, num_experts)
            meeting = ops.meet(counts, group)
            return ops.send(rows, meeting, group), meeting.counts, (*route, *meeting)

        return dispatch

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: tuple[Tensor, ...]) -> Tensor:
            own, meeting = route[: -len(ops.Meeting._fields)], ops.Meeting(*route[-len(ops.Meeting._fields) :])
            return inner(ops.give_back(rows, meeting, gates.numel(), group), gates, own)

        return combine

    return around_dispatch, around_combine
