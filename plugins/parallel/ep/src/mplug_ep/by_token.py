"""Dispatch by token: whole tokens travel to other ranks, and a rank sums the rows of a token before they return.

N tokens of a rank, D embed, k experts per token, E experts, R ranks, e = E / R experts per rank, M tokens received.

    wrap                       forward
    around dispatch, before    the way sends x, chosen and gates [N, ...] -> [M, ...]; choices of other ranks' experts
                               are dropped, and their gates are 0
    around combine, after      the way sums the ranks' results [M, D] -> [N, D]

The supplier inside sorts the rows of the tokens that have arrived, and weighs them by the gates that have arrived.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

import mplug_ops as ops

Route = tuple[Tensor, ...]
Dispatched = tuple[Tensor, Tensor, Route]
Dispatch = Callable[..., Dispatched]
Arrive = Callable[[Tensor, Route], tuple[Tensor, Route]]
Combine = Callable[[Tensor, Tensor, Route], Tensor]
Wraps = dict[str, Callable[..., Any]]
"""Functions that wrap the content of a slot of `Experts`, by the attribute of the slot."""


class Arrived(NamedTuple):
    """What a rank has received: x [M, D], chosen [M, k] among all E experts, gates [M, k], and the way back.

    `num_rows` is the number of choices of this rank's experts, or None if the CPU does not know it. `back` are the
    tensors that `TokenWay.give_back` needs, always as many as `TokenWay.length`.
    """

    x: Tensor
    chosen: Tensor
    gates: Tensor
    num_rows: int | None
    back: Route


class TokenWay(Protocol):
    """How tokens travel to the ranks of their experts, and the sums back; both are differentiable."""

    length: int

    def send(self, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int) -> Arrived:
        """x [N, D], chosen [N, k] (`num_experts`: dropped), gates [N, k]."""

    def give_back(self, y: Tensor, back: Route) -> Tensor:
        """y [M, D] -> the sums [N, D] of what the ranks have computed for each token."""


class Gathered:
    """Every token travels to every rank of a group."""

    length = 0

    def __init__(self, group: ops.Group) -> None:
        self.group = group

    def send(self, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int) -> Arrived:
        """`ops.gather` [N, D] -> [R N, D]."""
        gathered = ops.all_gather(chosen, self.group, 0)
        return Arrived(ops.gather(x, self.group, 0), gathered, ops.gather(gates, self.group, 0), None, ())

    def give_back(self, y: Tensor, back: Route) -> Tensor:
        """`ops.scatter` [R N, D] -> [N, D], the dual."""
        return ops.scatter(y, self.group, 0)


def by_token(way: TokenWay, size: int = 1, index: int = 0) -> Wraps:
    """Wraps by which this rank, `index` of `size`, computes its part of the experts for the tokens of all ranks.

    With `size` 1 no choice is dropped (expert tensor parallelism).
    """

    def around_dispatch(inner: Dispatch) -> Dispatch:
        def dispatch(
            x: Tensor,
            chosen: Tensor,
            gates: Tensor,
            num_experts: int,
            num_rows: int | None = None,
        ) -> Dispatched:
            each = num_experts // size
            arrived = way.send(x, chosen, gates, num_experts)
            own = arrived.chosen - index * each
            held = (own >= 0) & (own < each)
            gates = arrived.gates.where(held, 0)
            rows, counts, route = inner(arrived.x, own.where(held, each), gates, each, arrived.num_rows)
            return rows, counts, (*route, gates, *arrived.back)

        return dispatch

    def parted(route: Route) -> tuple[Route, Route]:
        """The route of the supplier inside; the gates and the way back."""
        at = len(route) - way.length - 1
        return route[:at], route[at:]

    def around_arrive(inner: Arrive) -> Arrive:
        def arrive(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
            inside, own = parted(route)
            rows, arrived = inner(rows, inside)
            return rows, (*arrived, *own)

        return arrive

    def around_combine(inner: Combine) -> Combine:
        def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
            inside, (arrived_gates, *back) = parted(route)
            return way.give_back(inner(rows, arrived_gates, inside), tuple(back))

        return combine

    return {
        "dispatch": around_dispatch,
        "arrive": around_arrive,
        "leave": around_arrive,
        "combine": around_combine,
    }


def without(route: Sequence[Tensor], kind: type[Any]) -> tuple[Route, Any]:
    """The route of the supplier inside, and the named tuple of tensors of the class `kind` behind it."""
    at = len(route) - len(kind._fields)
    return tuple(route[:at]), kind(*route[at:])
