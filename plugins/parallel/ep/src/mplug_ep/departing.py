"""Rows that travel while a rank computes something else: the shared experts, or other parts of its tokens.

N tokens of a part, D embed, k experts per token, M rows received, P parts of a micro batch.

    wrap              forward                                              backward
    around dispatch   after: start to send the rows [N k, D]               await their gradients
    around arrive     before: await the rows [M, D]                        start to return the gradients
    around leave      after: start to return the results [M, D]            await their gradients
    around combine    before: await the results [N k, D]                   start to send the gradients
    around parts      divide the tokens of a micro batch into P parts      join

With P parts, a block computes in this order; backward computes in the reverse order:

    dispatch 1, dispatch 2, [shared experts], experts 1, experts 2, combine 1, combine 2

So the rows of part 2 travel to their experts while those of part 1 are multiplied, and the results of part 1 return
while part 2 is multiplied. Autograd runs the nodes that were created last first, so it mirrors the order. Every
exchange of backward starts in a node of its own, and another node awaits it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import Model
from mplug_ep.bounds import Bounds, choosing
from mplug_ep.by_token import Arrive, Combine, Dispatch, Dispatched, Route, Wraps, without
from mplug_ep.places import Places
from mplug_ep.pushed_rows import arrive_back_pushed, arrive_pushed, depart_back_pushed, depart_pushed

Parts = Callable[..., tuple[tuple[Tensor, ...], ...]]


@dataclass(frozen=True)
class DepartingWay:
    """How rows travel in two directions, in two parts each: what the ranks agree on first, of the class `kind`.

    meet(rows [N k, D] ordered by bin, counts) -> a `kind`; depart(rows, it) and arrive(*departed, it) -> [M, D];
    depart_back(rows [M, D], it, N k) and arrive_back(*departed, it) -> [N k, D].
    """

    kind: type[Any]
    meet: Callable[[Tensor, Tensor], Any]
    depart: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
    arrive: Callable[[Tensor, Tensor, Any], Tensor]
    depart_back: Callable[[Tensor, Any, int], tuple[Tensor, Tensor]]
    arrive_back: Callable[[Tensor, Tensor, Any], Tensor]


def exactly(group: ops.Group, counting: ops.Group) -> DepartingWay:
    """In buffers whose size is the number of rows."""
    return DepartingWay(
        ops.Meeting,
        lambda _, counts: ops.meet(counts, counting),
        lambda rows, one: ops.depart(rows, one.sizes, one.order.shape[0], group),
        lambda rows, arriving, one: ops.arrive(rows, arriving, one.order, one.inverse, one.sizes, group),
        lambda rows, one, number: ops.depart_back(rows, one.order, one.inverse, one.sizes, number, group),
        lambda rows, returning, one: ops.arrive_back(rows, returning, one.sizes, group),
    )


def in_buffers(group: ops.Group, counting: ops.Group, bounds: Bounds) -> DepartingWay:
    """In buffers of a fixed size."""

    def depart(rows: Tensor, one: ops.BoundedMeeting) -> tuple[Tensor, Tensor]:
        rows = ops.pack_bounded(rows, one)
        return ops.depart(rows, _even_sizes(rows, group), len(rows), group)

    def depart_back(rows: Tensor, one: ops.BoundedMeeting, _: int) -> tuple[Tensor, Tensor]:
        return ops.depart_back(rows, one.order, one.inverse, _even_sizes(rows, group), len(rows), group)

    return DepartingWay(
        ops.BoundedMeeting,
        lambda rows, counts: bounds.met(rows, counts, counting),
        depart,
        lambda rows, arriving, one: ops.arrive(rows, arriving, one.order, one.inverse, _even_sizes(rows, group), group),
        depart_back,
        lambda rows, returning, one: ops.unpack_bounded(
            ops.arrive_back(rows, returning, _even_sizes(rows, group), group), one
        ),
    )


def pushed(group: ops.Group, counting: ops.Group, bounds: Bounds) -> DepartingWay:
    """By kernels that write rows into the memory of other GPUs, on a stream of their own."""
    return DepartingWay(
        Places,
        lambda rows, counts: bounds.met_places(rows, counts, counting),
        lambda rows, places: depart_pushed(rows, places, group),
        lambda rows, arriving, places: arrive_pushed(rows, arriving, places, group),
        lambda rows, places, _: depart_back_pushed(rows, places, group),
        lambda rows, returning, places: arrive_back_pushed(rows, returning, places, group),
    )


def departing(exact: DepartingWay, bounded: DepartingWay | None, bounds: Bounds | None) -> Wraps:
    """Wraps of all slots of `Experts` between which rows travel, with the bits of those that wait at once.

    The way is `exact` unless `bounds` apply. Behind the route of the supplier inside are the meeting, a tensor without
    elements [N k, 0], which states the number of this rank's rows, and while rows travel the rows that arrive.
    """
    way = choosing(exact, bounded, bounds)

    def parted(route: Sequence[Tensor]) -> tuple[Route, Any, int]:
        """The route of the supplier inside, the meeting, and the number of this rank's rows."""
        *front, rows = route
        own, meeting = without(front, way().kind)
        return own, meeting, rows.shape[0]

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
            leaving, arriving = way().depart(rows, meeting)
            return leaving, meeting.counts, (*route, *meeting, rows.new_empty(rows.shape[0], 0), arriving)

        return dispatch

    def around_arrive(inner: Arrive) -> Arrive:
        def arrive(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            *front, arriving = route
            _, meeting, _ = parted(front)
            return inner(way().arrive(rows, arriving, meeting), tuple(front))

        return arrive

    def around_leave(inner: Arrive) -> Arrive:
        def leave(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            rows, route = inner(rows, route)
            _, meeting, number = parted(route)
            leaving, returning = way().depart_back(rows, meeting, number)
            return leaving, (*route, returning)

        return leave

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
            *front, returning = route
            own, meeting, _ = parted(front)
            return inner(way().arrive_back(rows, returning, meeting), gates, own)

        return combine

    return {"dispatch": around_dispatch, "arrive": around_arrive, "leave": around_leave, "combine": around_combine}


def in_parts(model: Model, number: int, copies: int) -> Callable[[Parts], Parts]:
    """A wrap of `MixtureOfExperts.parts` that divides tokens into `number` parts, in training.

    The number of tokens in a part is a multiple of `copies`, the number of ranks that hold the same tokens.
    """

    def around_parts(inner: Parts) -> Parts:
        def parts(*tokens: Tensor) -> tuple[tuple[Tensor, ...], ...]:
            whole = inner(*tokens)
            if not model.module.training:
                return whole
            return tuple(part for one in whole for part in _divided(one, number, copies))

        return parts

    return around_parts


def _divided(tokens: tuple[Tensor, ...], number: int, copies: int) -> tuple[tuple[Tensor, ...], ...]:
    shares = tokens[0].shape[0] // copies
    sizes = [copies * (end - start) for start, end in pairwise(shares * n // number for n in range(number + 1))]
    return tuple(zip(*(one.split(sizes) for one in tokens), strict=True))


def _even_sizes(rows: Tensor, group: ops.Group) -> Tensor:
    """The sizes [2, R], on the CPU, of an exchange in which each rank sends as many rows to every rank."""
    assert group is not None
    return torch.full((2, group.size()), len(rows) // group.size(), dtype=torch.int64, device="cpu")
