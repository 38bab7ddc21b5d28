"""Differentiable collectives against the same computation in one process, and against each other."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise, permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_ops.transfers import shift
from mplug_testing import run_workers

WHOLE, STRIDED = "whole", "strided"
LAYOUTS = {"2": (2, WHOLE), "4": (4, WHOLE), "2 of 4": (4, STRIDED)}
"""World size and groups: all ranks, or every second one, in which a rank's number is not its number in the world."""
SHAPE = (4, 8, 12)
DUALS = {
    "copy": "reduce",
    "reduce": "copy",
    "gather": "scatter",
    "scatter": "gather",
    "split": "join",
    "join": "split",
    "exchange": "exchange",
}
Case = tuple[str, tuple[int, ...]]
"""A function, and the dimensions that it takes."""
CASES: list[Case] = [
    *((name, ()) for name in ("copy", "reduce")),
    *((name, (dim,)) for name in ("gather", "scatter", "split", "join") for dim in range(3)),
    *(("exchange", dims) for dims in permutations(range(3), 2)),
]
ALIKE_IN, ALIKE_OUT = ("copy", "split"), ("reduce", "join")
"""Functions whose input, and whose output and its gradient, all ranks hold alike."""

Result = dict[str, Tensor]


def drawn(shape: tuple[int, ...], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(number * 1000**place for place, number in enumerate(seed)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def output_shape(name: str, dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    shape = list(SHAPE)
    if dims and name not in ("gather", "join"):
        shape[dims[0]] //= size
    if name in ("gather", "join", "exchange"):
        shape[dims[-1]] *= size
    return tuple(shape)


def input_of(name: str, rank: int) -> Tensor:
    return drawn(SHAPE, 1, 0 if name in ALIKE_IN else rank)


def upstream_of(name: str, dims: tuple[int, ...], size: int, rank: int) -> Tensor:
    """The gradient of a rank's output."""
    return drawn(output_shape(name, dims, size), 2, 0 if name in ALIKE_OUT else rank)


def expected(name: str, dims: tuple[int, ...], size: int) -> list[tuple[Tensor, Tensor]]:
    """Each rank's (output, gradient of the input), by autograd over the inputs of all ranks in one process."""
    if name in ALIKE_IN:
        x = input_of(name, 0).requires_grad_()
        outputs = list(x.chunk(size, *dims)) if dims else [x] * size
        torch.autograd.backward([y * 1 for y in outputs], [upstream_of(name, dims, size, r) for r in range(size)])
        return [(y.detach(), x.grad) for y in outputs]
    xs = [input_of(name, rank).requires_grad_() for rank in range(size)]
    combined = torch.cat(xs, dims[-1]) if name in ("gather", "join", "exchange") else torch.stack(xs).sum(0)
    if name in ALIKE_OUT:
        combined.backward(upstream_of(name, dims, size, 0))
        return [(combined.detach(), x.grad) for x in xs]
    outputs = [combined] * size if name == "gather" else list(combined.chunk(size, dims[0]))
    torch.autograd.backward([y * 1 for y in outputs], [upstream_of(name, dims, size, r) for r in range(size)])
    return [(y.detach(), x.grad) for y, x in zip(outputs, xs, strict=True)]


def group_of(groups: str) -> ops.Group:
    if groups == WHOLE:
        return dist.group.WORLD
    made = [dist.new_group(list(range(first, dist.get_world_size(), 2))) for first in range(2)]
    return made[dist.get_rank() % 2]


def measured(groups: str) -> dict[Case, Result]:
    """Outputs and gradients of every case on this rank."""
    group = group_of(groups)
    return {case: measured_case(*case, group) for case in CASES}


def measured_case(name: str, dims: tuple[int, ...], group: ops.Group) -> Result:
    """Output and gradient, also of an input with another order in memory and of dimensions that count from the end."""
    rank, found = group.rank(), Result()
    given, upstream = input_of(name, rank), upstream_of(name, dims, group.size(), rank)
    for how, order in (("", dims), ("strided ", dims), ("negative ", tuple(dim - len(SHAPE) for dim in dims))):
        x, grad = (in_another_order(one) if how == "strided " else one for one in (given, upstream))
        x = x.clone().requires_grad_()
        y = getattr(ops, name)(x, group, *order)
        y.backward(grad)
        found |= {f"{how}output": y.detach(), f"{how}gradient": x.grad}
    return {**found, "dual": getattr(ops, DUALS[name])(upstream, group, *reversed(dims))}


def in_another_order(x: Tensor) -> Tensor:
    """The same values, the last dimension lying first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


@cache
def results(layout: str) -> list[dict[Case, Result]]:
    world_size, groups = LAYOUTS[layout]
    return run_workers(world_size, measured, groups)


def ranks_of(layout: str) -> list[tuple[int, int, int]]:
    """(rank in the world, rank in its group, size of the group)."""
    world_size, groups = LAYOUTS[layout]
    return [(r, r, world_size) if groups == WHOLE else (r, r // 2, world_size // 2) for r in range(world_size)]


def close(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "dims"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value))
)
def test_outputs_and_gradients_are_those_of_one_process(layout: str, name: str, dims: tuple[int, ...]) -> None:
    for world_rank, rank, size in ranks_of(layout):
        result, (output, gradient) = results(layout)[world_rank][name, dims], expected(name, dims, size)[rank]
        close(result["output"], output)
        close(result["gradient"], gradient)
        assert torch.equal(result["gradient"], result["dual"]), "the backward of each is the forward of its dual"
        for of in ("output", "gradient"):
            assert torch.equal(result[f"strided {of}"], result[of]), "the order in memory changes nothing"
            assert torch.equal(result[f"negative {of}"], result[of]), "a negative dimension counts from the end"


ALONG = ("gather", "scatter", "split", "join", "all_gather", "reduce_scatter", "own_part")


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        *((name, ()) for name in ("copy", "reduce", "all_reduce")),
        *((name, (dim,)) for name in ALONG for dim in range(3)),
        *((name, (0, 1)) for name in ("exchange", "all_to_all")),
    ],
)
def test_a_group_of_none_is_the_identity(name: str, dims: tuple[int, ...]) -> None:
    x = drawn(SHAPE, 1).requires_grad_()
    assert getattr(ops, name)(x, None, *dims) is x


def plain(dim: int) -> list[Tensor]:
    """What each makes of this rank's x, and x afterwards."""
    group, x = dist.group.WORLD, drawn(SHAPE, 1, dist.get_rank())
    made = [
        ops.all_reduce(x, group),
        ops.all_reduce(x, group, "MAX"),
        ops.all_gather(x, group, dim),
        ops.reduce_scatter(x, group, dim),
        ops.own_part(x, group, dim),
        ops.all_to_all(x, group, dim, dim - 1),
    ]
    return [*made, x]


@pytest.mark.parametrize("dim", range(3))
def test_plain_collectives_leave_their_input_alone(dim: int) -> None:
    xs = [drawn(SHAPE, 1, rank) for rank in range(2)]
    for rank, (reduced, most, gathered, scattered, own, exchanged, x) in enumerate(run_workers(2, plain, dim)):
        close(reduced, xs[0] + xs[1])
        close(most, torch.maximum(*xs))
        close(gathered, torch.cat(xs, dim))
        close(scattered, (xs[0] + xs[1]).chunk(2, dim)[rank])
        close(own, xs[rank].chunk(2, dim)[rank])
        close(exchanged, torch.cat(xs, dim - 1).chunk(2, dim)[rank])
        assert torch.equal(x, xs[rank])
        assert own.is_contiguous()


def refusals() -> list[str]:
    """What the functions that cut say of 3 rows over 2 ranks."""
    said = []
    for cut in (ops.scatter, ops.split, ops.reduce_scatter, ops.own_part, ops.exchange, ops.all_to_all):
        with pytest.raises(RuntimeError) as refused:
            cut(torch.ones(3, 2), dist.group.WORLD, *((0, 1) if cut in (ops.exchange, ops.all_to_all) else (0,)))
        said.append(str(refused.value))
    return said


def test_a_dimension_that_the_ranks_do_not_divide_is_never_cut_short() -> None:
    for said in run_workers(2, refusals):
        assert all("multiply up" in reason for reason in said)


# Rows that go to other ranks in numbers that only the data decides, and come back.


RANKS, WIDTH = 3, 2
COUNTS: dict[str, list[list[int]]] = {
    "two bins a rank": [[1, 0, 2, 3, 0, 1], [0, 0, 0, 1, 1, 1], [4, 1, 0, 0, 2, 2]],
    "one bin a rank": [[2, 1, 3], [0, 2, 0], [1, 1, 1]],
    "a rank that sends nothing": [[0] * 6, [1] * 6, [2] * 6],
    "a rank that gets nothing": [[3, 1, 0, 0, 1, 1]] * 3,
    "all to one bin": [[0, 0, 0, 5, 0, 0]] * 3,
    "nothing at all": [[0] * 6] * 3,
}
"""How many rows each rank has in each bin."""
PADDING = 2
"""Rows after those of the last bin, which travel nowhere."""


def labels(counts: list[list[int]], rank: int) -> Tensor:
    """A rank's rows, each (bin, sender, number)."""
    rows = [(place, rank, number) for place, count in enumerate(counts[rank]) for number in range(count)]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def arriving(counts: list[list[int]], rank: int) -> Tensor:
    """What a rank gets: the rows of its bins, by bin, then by sender."""
    rows = torch.cat([labels(counts, sender) for sender in range(RANKS)])
    each = len(counts[0]) // RANKS
    own = rows[(rows[:, 0] >= rank * each) & (rows[:, 0] < (rank + 1) * each)]
    key = own[:, 0] * 10_000 + own[:, 1] * 100 + own[:, 2]
    return own[key.argsort()]


def awaited(rows: Tensor, meeting: ops.Meeting) -> Tensor:
    """What `ops.send` returns, by `depart` and `arrive`."""
    leaving, arriving = ops.depart(rows, meeting.sizes, len(meeting.order), dist.group.WORLD)
    return ops.arrive(leaving, arriving, meeting.order, meeting.inverse, meeting.sizes, dist.group.WORLD)


def travelled() -> dict[str, tuple[list[int], Tensor, Tensor, float, float]]:
    """Of every case: counts and rows as they arrive, rows that came back, <send x, y> and <x, the gradient of y>."""
    group, rank = dist.group.WORLD, dist.get_rank()
    found = {}
    for name, counts in COUNTS.items():
        own = labels(counts, rank)
        padded = torch.cat((own, own.new_full((PADDING, 3), torch.nan)))
        meeting = ops.meet(torch.tensor(counts[rank]), group)
        arrived = ops.send(padded, meeting, group)
        back = ops.give_back(arrived, meeting, len(own), group)
        assert torch.equal(awaited(padded, meeting), arrived)
        x = torch.randn(len(own), WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        y = torch.randn(len(arrived), WIDTH, generator=torch.Generator().manual_seed(9 + rank), requires_grad=True)
        (gradient,) = torch.autograd.grad(ops.send(x, meeting, group), x, y.detach())
        returned = ops.give_back(y, meeting, len(own), group)
        assert torch.equal(returned, gradient)
        assert torch.equal(*torch.autograd.grad(awaited(x, meeting), x, y.detach()), gradient)
        (dual,) = torch.autograd.grad(returned, y, x.detach())
        assert torch.equal(dual, ops.send(x, meeting, group))
        inner = float((x.detach() * gradient).sum()), float((y.detach() * dual).sum())
        found[name] = (meeting.counts.tolist(), arrived, back, *inner)
    return found


def test_rows_arrive_by_bin_and_by_sender_come_back_and_are_each_others_gradient() -> None:
    results = run_workers(RANKS, travelled)
    for name, counts in COUNTS.items():
        for rank, result in enumerate(results):
            held, arrived, back, _, _ = result[name]
            wanted = arriving(counts, rank)
            assert torch.equal(arrived, wanted), name
            first = rank * len(counts[0]) // RANKS
            assert held == [sum(c[first + number] for c in counts) for number in range(len(held))], name
            assert torch.equal(back, labels(counts, rank)), name
        sums = [sum(result[name][place] for result in results) for place in (3, 4)]
        assert all(abs(one - other) < 1e-4 for one, other in pairwise(sums)), name


def shifted() -> list[int]:
    """What this rank gets of the ranks' numbers, shifted forward and back."""
    own = torch.tensor([dist.get_rank()])
    return [int(shift(own, dist.group.WORLD, by).wait()) for by in (1, -1)]


def test_a_shift_brings_the_tensor_of_the_rank_before() -> None:
    """In a ring of two ranks, both directions are one."""
    assert run_workers(3, shifted) == [[2, 1], [0, 2], [1, 0]]


def heard() -> list[str]:
    """What a listener hears of a sum forward and backward, and of one after it has gone."""
    calls, x = list[str](), torch.ones(4, requires_grad=True)

    def begins() -> Callable[[], None]:
        calls.append("begin")
        return lambda: calls.append("end")

    with ops.listening(begins):
        ops.copy(ops.reduce(x, dist.group.WORLD), dist.group.WORLD).sum().backward()
    ops.reduce(x.detach(), dist.group.WORLD)
    return calls


def test_a_listener_hears_begin_and_end_of_each_collective_while_it_listens() -> None:
    assert run_workers(2, heard) == [["begin", "end"] * 2] * 2
