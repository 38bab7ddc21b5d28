"""The wraps of expert parallelism around dispatch and combine, from the outermost to the innermost.

N tokens of a rank, D embed, k experts per token, E experts, R ranks of ep, e = E / R experts per rank, T ranks of etp,
C ranks that hold copies of the same tokens (tensor parallelism without sequence parallelism), M rows received.

layer              around dispatch                               around combine
copies             before: split to own part [N, D] -> [N/C, D]  after: join the parts, [N/C, D] -> [N, D]
etp                before: gather tokens, [N, D] -> [T N, D]     after: scatter (sum partial results, keep own tokens),
                                                                 [T N, D] -> [N, D]
ep, all_gather     before: gather tokens, [N, D] -> [R N, D],    after: scatter, [R N, D] -> [N, D]
                   and drop choices of other ranks' experts
ep, once_per_rank  before: send each token once to every rank    after: return a rank's sum for a token and add up,
                   that has one of its experts, [N, D] -> [M, D] [M, D] -> [N, D]
ep, deepep         the same by DeepEP                            the same
ep, all_to_all     after: send rows to their experts' ranks,     before: give rows back to the ranks they came from,
                   [N k, D] -> [M, D]                            [M, D] -> [N k, D]
ep, overlap        after: let the rows depart                    before: await the rows
                   around arrive, before: await them             around leave, after: let them depart
ep, bounded        the same into buffers of a fixed size M; if   the same
                   rows have no room, all_to_all in the
                   repeated step
ep, symmetric      the same by kernels that write each row       the same
                   into the memory of its GPU

The two operations of a line are each other's dual (split/join, gather/scatter, send/give_back), so autograd derives
the backward pass. Where tokens travel, their gates do too, and the route has those that arrived. The supplier inside
sorts the tokens of one rank by expert once. Experts are numbered in rank order, so this also sorts them by (rank,
expert).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

import mplug_ops as ops
from mplug import Model, Run, Site, Wrap
from mplug_ep.bounds import Bounds, choosing
from mplug_ep.by_token import (
    Arrive,
    Combine,
    Dispatch,
    Dispatched,
    Gathered,
    Route,
    TokenWay,
    Wraps,
    by_token,
    without,
)
from mplug_ep.deepep import DeepEP, open_buffer
from mplug_ep.departing import departing, exactly, in_buffers, in_parts, pushed
from mplug_ep.fit import copying_axes
from mplug_ep.mailbox import open_mailbox
from mplug_ep.once_per_rank import OncePerRank
from mplug_ep.places import Places
from mplug_ep.pushed_rows import give_back_pushed, send_pushed

COPIES, ETP, EP = 120, 100, 50
"""Layers, from the outermost: the split of copies, then etp, which splits weights, then ep, which sends tokens."""

SYMMETRIC = "symmetric"
"""The value of `parallel.ep.dispatch` for rows that kernels write into the memory of other GPUs."""

DEEPEP = "deepep"
"""The value of `parallel.ep.dispatch` for the library DeepEP."""

TOKEN_WAYS = ("all_gather", "once_per_rank", DEEPEP)
"""The values of `parallel.ep.dispatch` with which tokens travel, not rows."""

USE = "experts"
"""Use separate process groups: backward waits for tokens, which must not queue behind the gradient sums."""

COUNTING = "numbers of experts' rows"
"""The use of the group for the numbers of rows, if the rows of several parts travel at once."""


def wraps_of_ep(
    run: Run, model: Model, how: str, bounds: Bounds | None = None, overlap: bool = False, parts: int = 1
) -> list[Wrap]:
    """The wraps of expert parallelism; without etp, also those for ranks that hold copies of the same tokens."""
    if run.mesh.axes["ep"].size == 1:
        return []
    group = run.group("ep", use=USE)
    if how == SYMMETRIC:
        open_mailbox(run, group)
    divided = _divided(model, "ep")
    if how in TOKEN_WAYS:
        way = _token_way(run, group, how)
        own = by_token(way, run.mesh.axes["ep"].size, run.mesh.index(run.rank, "ep"))
    elif overlap:
        own = _departing(group, run.group("ep", use=COUNTING) if parts > 1 else group, bounds, how)
    else:
        own = _travelling(group, bounds, how)
    etp = run.mesh.axes.get("etp")
    outer = [] if etp is not None and etp.size > 1 else _own_part(run, divided)
    divide = in_parts(model, parts, prod(run.mesh.axes[name].size for name in copying_axes(run.mesh)))
    in_turn = [] if parts == 1 else [Wrap("MixtureOfExperts.parts", divide, EP, supports=divided)]
    return [*_around(own, EP, divided, uneven=how not in ("all_gather", DEEPEP)), *in_turn, *outer]


def wraps_of_etp(run: Run, model: Model) -> list[Wrap]:
    """The wraps of expert tensor parallelism, and those for ranks that hold copies of the same tokens."""
    if run.mesh.axes["etp"].size == 1:
        return []
    divided = _divided(model, "etp")
    return [*_around(by_token(Gathered(run.group("etp", use=USE))), ETP, divided), *_own_part(run, divided)]


def _departing(group: ops.Group, counting: ops.Group, bounds: Bounds | None, how: str) -> Wraps:
    """Wraps between which rows travel. The numbers of rows of one part must not queue behind the rows of another."""
    bounded = None
    if bounds is not None:
        bounded = (pushed if how == SYMMETRIC else in_buffers)(group, counting, bounds)
    return departing(exactly(group, counting), bounded, bounds)


def _token_way(run: Run, group: ops.Group, how: str) -> TokenWay:
    if how == DEEPEP:
        open_buffer(run, group)
        return DeepEP(group)
    return Gathered(group) if how == "all_gather" else OncePerRank(group)


def _around(wraps: Wraps, layer: int, divided: Callable[[Site, Run], bool], *, uneven: bool = False) -> list[Wrap]:
    return [Wrap(f"Experts.{name}", wrap, layer, supports=divided, uneven=uneven) for name, wrap in wraps.items()]


def _divided(model: Model, axis: str) -> Callable[[Site, Run], bool]:
    """A `supports` function: whether a mesh axis splits the experts of a site."""

    def supports(site: Site, run: Run) -> bool:
        own = (where for name, where in model.placements.items() if name.startswith(f"{site.name}."))
        return any(axis in placement.splits.values() for placement in own)

    return supports


def _own_part(run: Run, divided: Callable[[Site, Run], bool]) -> list[Wrap]:
    """Wraps with which ranks that hold copies of the same tokens split them among themselves; none without copies.

    Dispatch: `ops.split` [N, D] -> [N/C, D]; combine: `ops.join` [N/C, D] -> [N, D], its dual.
    """
    axes = copying_axes(run.mesh)
    if not axes:
        return []
    group = run.group(*axes, use=USE)

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(
            x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, num_rows: int | None = None
        ) -> Dispatched:
            gates = ops.split(gates, group, 0)
            rows, counts, route = inner(ops.split(x, group, 0), ops.own_part(chosen, group, 0), gates, num_experts)
            return rows, counts, (*route, gates)

        return dispatch

    def around_arrive(inner: Arrive) -> Arrive:
        def arrive(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            rows, arrived = inner(rows, route[:-1])
            return rows, (*arrived, route[-1])

        return arrive

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
            return ops.join(inner(rows, route[-1], route[:-1]), group, 0)

        return combine

    wraps: Wraps = {
        "dispatch": around_dispatch,
        "arrive": around_arrive,
        "leave": around_arrive,
        "combine": around_combine,
    }
    return _around(wraps, COPIES, divided, uneven=True)


@dataclass(frozen=True)
class Way:
    """How rows travel: what the ranks agree on first, a tuple of tensors of the class `kind`, and the two directions.

    meet(rows [N, D] ordered by bin, counts) -> a `kind`; send(rows, it) -> [M, D]; give_back(rows [M, D], it, N) ->
    [N, D].
    """

    kind: type[Any]
    meet: Callable[[Tensor, Tensor], Any]
    send: Callable[[Tensor, Any], Tensor]
    give_back: Callable[[Tensor, Any, int], Tensor]


def _exactly(group: ops.Group) -> Way:
    """In buffers whose size is the number of rows."""
    return Way(
        ops.Meeting,
        lambda _, counts: ops.meet(counts, group),
        lambda rows, meeting: ops.send(rows, meeting, group),
        lambda rows, meeting, num_rows: ops.give_back(rows, meeting, num_rows, group),
    )


def _in_buffers(group: ops.Group, bounds: Bounds) -> Way:
    """In buffers of a fixed size."""
    return Way(
        ops.BoundedMeeting,
        lambda rows, counts: bounds.met(rows, counts, group),
        lambda rows, meeting: ops.send_bounded(rows, meeting, group),
        lambda rows, meeting, _: ops.give_back_bounded(rows, meeting, group),
    )


def _pushed(group: ops.Group, bounds: Bounds) -> Way:
    """By kernels that write rows into the memory of other GPUs, which has a fixed size."""
    return Way(
        Places,
        lambda rows, counts: bounds.met_places(rows, counts, group),
        lambda rows, places: send_pushed(rows, places, group),
        lambda rows, places, _: give_back_pushed(rows, places, group),
    )


def _travelling(group: ops.Group, bounds: Bounds | None, how: str = "") -> Wraps:
    """Wraps that send each row to the rank of its expert, and the result back.

    Dispatch: `send` [N k, D] -> [M, D]; combine: `give_back` [M, D] -> [N k, D], its dual. The way is exact unless
    `bounds` apply.
    """
    exact, bounded = _exactly(group), None
    if bounds is not None:
        bounded = _pushed(group, bounds) if how == SYMMETRIC else _in_buffers(group, bounds)
    way = choosing(exact, bounded, bounds)

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(
            x: Tensor,
            chosen: Tensor,
            gates: Tensor,
            num_experts: int,
            num_rows: int | None = None,
        ) -> Dispatched:
            rows, counts, route = inner(x, chosen, gates, num_experts)
            meeting = way().meet(rows, counts)
            return way().send(rows, meeting), meeting.counts, (*route, *meeting)

        return dispatch

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
            own, meeting = without(route, way().kind)
            return inner(way().give_back(rows, meeting, gates.numel()), gates, own)

        return combine

    return {"dispatch": around_dispatch, "combine": around_combine}
