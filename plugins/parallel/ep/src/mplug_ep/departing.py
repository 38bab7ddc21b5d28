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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import Model
from mplug_ep.bounds import Bounds
from mplug_ep.by_token import Arrive, Combine, Dispatch, Dispatched, Route, Wraps, without

Parts = Callable[..., tuple[tuple[Tensor, ...], ...]]


def departing(group: ops.Group, counting: ops.Group, bounds: Bounds | None) -> Wraps:
    """Wraps of all slots of `Experts` between which rows travel, with the bits of those that wait at once.

    `counting` is the group for the numbers of rows: those of one part must not queue behind the rows of another. Behind
    the route of the supplier inside are the meeting, a tensor without elements [N k, 0], which states the number of
    this rank's rows, and while rows travel the rows that arrive.
    """

    def is_bounded() -> bool:
        return bounds is not None and bounds.apply

    def parted(route: Sequence[Tensor]) -> tuple[Route, Any, int]:
        """The route of the supplier inside, the meeting, and the number of this rank's rows."""
        *front, rows = route
        own, meeting = without(front, ops.BoundedMeeting if is_bounded() else ops.Meeting)
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
            number = rows.new_empty(rows.shape[0], 0)
            if bounds is not None and bounds.apply:
                places = bounds.met(rows, counts, counting)
                rows = ops.pack_bounded(rows, places)
                leaving, arriving = ops.depart(rows, _even_sizes(rows, group), len(rows), group)
                return leaving, places.counts, (*route, *places, number, arriving)
            meeting = ops.meet(counts, counting)
            leaving, arriving = ops.depart(rows, meeting.sizes, meeting.order.shape[0], group)
            return leaving, meeting.counts, (*route, *meeting, number, arriving)

        return dispatch

    def around_arrive(inner: Arrive) -> Arrive:
        def arrive(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            *front, arriving = route
            _, meeting, _ = parted(front)
            sizes = _even_sizes(rows, group) if is_bounded() else meeting.sizes
            return inner(ops.arrive(rows, arriving, meeting.order, meeting.inverse, sizes, group), tuple(front))

        return arrive

    def around_leave(inner: Arrive) -> Arrive:
        def leave(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            rows, route = inner(rows, route)
            _, meeting, number = parted(route)
            sizes, number = (_even_sizes(rows, group), len(rows)) if is_bounded() else (meeting.sizes, number)
            leaving, returning = ops.depart_back(rows, meeting.order, meeting.inverse, sizes, number, group)
            return leaving, (*route, returning)

        return leave

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
            *front, returning = route
            own, meeting, _ = parted(front)
            sizes = _even_sizes(rows, group) if is_bounded() else meeting.sizes
            rows = ops.arrive_back(rows, returning, sizes, group)
            return inner(ops.unpack_bounded(rows, meeting) if is_bounded() else rows, gates, own)

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
