"""Differentiable collectives against the same computation in one process, and against each other."""

from collections.abc import Callable
from functools import cache
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mplug import ops
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


# What the workers do.


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
    rank, size = group.rank(), group.size()
    x, upstream = input_of(name, rank).requires_grad_(), upstream_of(name, dims, size, rank)
    y = getattr(ops, name)(x, group, *dims)
    y.backward(upstream)
    scrambled = in_another_order(x.detach()).requires_grad_()
    y_scrambled = getattr(ops, name)(scrambled, group, *dims)
    y_scrambled.backward(in_another_order(upstream))
    return {
        "output": y.detach(),
        "gradient": x.grad,
        "dual": getattr(ops, DUALS[name])(upstream, group, *reversed(dims)),
        "strided output": y_scrambled.detach(),
        "strided gradient": scrambled.grad,
        "slopes": slopes(name, dims, group),
    }


def in_another_order(x: Tensor) -> Tensor:
    """The same values, the last dimension lying first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


PROBES = ((0, 0, 0), (1, 3, 5), (3, 7, 11))


def slopes(name: str, dims: tuple[int, ...], group: ops.Group) -> Tensor:
    """[ranks, probes]: how the sum of all ranks' losses changes with an element of a rank's input, by differences."""
    owners = range(1 if name in ALIKE_IN else group.size())
    rows = [[slope(name, dims, group, owner, probe) for probe in PROBES] for owner in owners]
    return torch.tensor(rows, dtype=torch.float64)


def slope(name: str, dims: tuple[int, ...], group: ops.Group, owner: int, probe: tuple[int, ...]) -> float:
    losses = []
    for step in (0.5, -0.5):
        x = input_of(name, group.rank())
        if name in ALIKE_IN or group.rank() == owner:
            x[probe] += step
        y = getattr(ops, name)(x, group, *dims)
        loss = (y * upstream_of(name, dims, group.size(), group.rank())).sum()
        if name in ALIKE_OUT and group.rank() > 0:  # one loss, which all ranks compute
            loss.zero_()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
    return losses[0] - losses[1]


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


every_case = pytest.mark.parametrize(
    ("name", "dims"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value))
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@every_case
def test_outputs_and_gradients_are_those_of_one_process(layout: str, name: str, dims: tuple[int, ...]) -> None:
    for world_rank, rank, size in ranks_of(layout):
        output, gradient = expected(name, dims, size)[rank]
        close(results(layout)[world_rank][name, dims]["output"], output)
        close(results(layout)[world_rank][name, dims]["gradient"], gradient)


@every_layout
@every_case
def test_the_backward_of_each_is_the_forward_of_its_dual(layout: str, name: str, dims: tuple[int, ...]) -> None:
    for result in results(layout):
        assert torch.equal(result[name, dims]["gradient"], result[name, dims]["dual"])


@every_layout
@every_case
def test_gradients_are_the_slopes_of_the_loss(layout: str, name: str, dims: tuple[int, ...]) -> None:
    for world_rank, rank, _ in ranks_of(layout):
        result = results(layout)[world_rank][name, dims]
        measured_slopes = result["slopes"][0 if name in ALIKE_IN else rank]
        for probe, wanted in zip(PROBES, measured_slopes.tolist(), strict=True):
            assert result["gradient"][probe].item() == pytest.approx(wanted, abs=1e-9)


@every_layout
@every_case
def test_the_order_of_a_tensor_in_memory_changes_nothing(layout: str, name: str, dims: tuple[int, ...]) -> None:
    for result in results(layout):
        assert torch.equal(result[name, dims]["strided output"], result[name, dims]["output"])
        assert torch.equal(result[name, dims]["strided gradient"], result[name, dims]["gradient"])


@pytest.mark.parametrize("name", ["copy", "reduce", "all_reduce"])
def test_a_group_of_none_is_the_identity(name: str) -> None:
    x = drawn(SHAPE, 1).requires_grad_()
    assert getattr(ops, name)(x, None) is x


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("name", ["gather", "scatter", "split", "join", "all_gather", "reduce_scatter", "own_part"])
def test_a_group_of_none_is_the_identity_along_any_dimension(name: str, dim: int) -> None:
    x = drawn(SHAPE, 1).requires_grad_()
    assert getattr(ops, name)(x, None, dim) is x


@pytest.mark.parametrize("name", ["exchange", "all_to_all"])
def test_a_group_of_none_exchanges_nothing(name: str) -> None:
    x = drawn(SHAPE, 1).requires_grad_()
    assert getattr(ops, name)(x, None, 0, 1) is x


# The plain collectives.


def plain(dim: int) -> list[Tensor]:
    """What each makes of this rank's x, and x afterwards."""
    group, x = dist.group.WORLD, drawn(SHAPE, 1, dist.get_rank())
    made = [
        ops.all_reduce(x, group),
        ops.all_gather(x, group, dim),
        ops.reduce_scatter(x, group, dim),
        ops.own_part(x, group, dim),
        ops.all_to_all(x, group, dim, dim - 1),
    ]
    return [*made, x]


@pytest.mark.parametrize("dim", range(3))
def test_plain_collectives_leave_their_input_alone(dim: int) -> None:
    xs = [drawn(SHAPE, 1, rank) for rank in range(2)]
    for rank, (reduced, gathered, scattered, own, exchanged, x) in enumerate(run_workers(2, plain, dim)):
        close(reduced, xs[0] + xs[1])
        close(gathered, torch.cat(xs, dim))
        close(scattered, (xs[0] + xs[1]).chunk(2, dim)[rank])
        close(own, xs[rank].chunk(2, dim)[rank])
        close(exchanged, torch.cat(xs, dim - 1).chunk(2, dim)[rank])
        assert torch.equal(x, xs[rank])
        assert own.is_contiguous()


def refusals() -> list[str]:
    """What the functions that cut say of 3 rows over 2 ranks."""
    said = []
    along_one = (ops.scatter, ops.split, ops.reduce_scatter, ops.own_part)
    for cut, dims in [*((cut, (0,)) for cut in along_one), (ops.exchange, (0, 1)), (ops.all_to_all, (0, 1))]:
        try:
            cut(torch.ones(3, 2), dist.group.WORLD, *dims)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_dimension_that_the_ranks_do_not_divide_is_never_cut_short() -> None:
    for said in run_workers(2, refusals):
        assert all("multiply up" in reason for reason in said)


def training_step(functions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """A column-parallel, then a row-parallel linear between two functions: (output, gradients of x and of a weight)."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    enter, leave = (getattr(ops, name) for name in functions)
    divided = functions[0] == "gather"
    up, down = drawn((8, 6), 3).chunk(size, 0)[rank].requires_grad_(), drawn((6, 8), 4).chunk(size, 1)[rank]
    x = drawn((2, 4, 6), 5)
    x = (x.chunk(size, 1)[rank] if divided else x).requires_grad_()
    dims = (1,) if divided else ()
    y = leave(torch.relu(enter(x, group, *dims) @ up.t()) @ down.t(), group, *dims)
    weight = drawn((2, 4, 6), 6)
    y.backward(weight.chunk(size, 1)[rank] if divided else weight)
    return y.detach(), x.grad, up.grad


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("functions", [["copy", "reduce"], ["gather", "scatter"]], ids="-".join)
def test_a_pair_around_two_parallel_linears_gives_what_the_whole_linears_give(functions: list[str], size: int) -> None:
    x, up = drawn((2, 4, 6), 5).requires_grad_(), drawn((8, 6), 3).requires_grad_()
    y = torch.relu(x @ up.t()) @ drawn((6, 8), 4).t()
    y.backward(drawn((2, 4, 6), 6))
    divided = functions[0] == "gather"
    part: Callable[[Tensor, int], Tensor] = lambda t, rank: t.chunk(size, 1)[rank] if divided else t  # noqa: E731
    for rank, (output, grad_x, grad_up) in enumerate(run_workers(size, training_step, functions)):
        close(output, part(y.detach(), rank))
        close(grad_x, part(x.grad, rank))
        close(grad_up, up.grad.chunk(size, 0)[rank])


def from_the_end() -> list[tuple[Case, bool, bool]]:
    """Of each case with dimensions: whether negative ones give the same output and the same gradient."""
    group, found = dist.group.WORLD, []
    assert group is not None
    for name, dims in CASES:
        if not dims:
            continue
        results = []
        for chosen in (dims, tuple(dim - len(SHAPE) for dim in dims)):
            x = input_of(name, group.rank()).requires_grad_()
            y = getattr(ops, name)(x, group, *chosen)
            y.backward(upstream_of(name, dims, group.size(), group.rank()))
            results.append((y.detach(), x.grad))
        (y, gradient), (other, other_gradient) = results
        found.append(((name, dims), torch.equal(y, other), torch.equal(gradient, other_gradient)))
    return found


def test_a_negative_dimension_counts_from_the_end() -> None:
    for found in run_workers(2, from_the_end):
        assert len(found) == 18
        assert [case for case, *same in found if not all(same)] == []
