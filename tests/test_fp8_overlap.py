"""Products in FP8 beside tensor parallelism's collectives: fp8 numbers travel, and no result changes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import file_memory
import pytest
import torch
import torch.distributed as dist
from gpus import traced, with_nccl
from mplug_fp8.products import Blockwise, Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from mplug_fp8.scaled import Products
from mplug_tp.boundary import boundary
from mplug_tp.chunked import SequenceCollectives, name_for
from mplug_tp.messages import Messages
from mplug_tp.peers import Peers
from mplug_tp.samples import Samples
from torch import Tensor

from mplug_nn import Arrival, Boundary, ChunkedCollectives, Narrow, Operand, Produce, Sink, collectives_named
from mplug_nn.chunked_collectives import COLLECTIVES, name_collectives
from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, train_ranks, train_steps

LONG, NARROW = 512, 256
SHAPES = [(2, 256), (3, 32), (1, 64)]
"""Leading dimensions and the sequence: rows of a rank that fill blocks of 128 rows or do not, and one sample."""
POWER = Options(power_of_two=True)
RECIPES: dict[str, Callable[..., Products]] = {
    "tensorwise": partial(Tensorwise, Options()),
    "delayed": partial(Delayed, Options()),
    "rowwise": partial(Rowwise, POWER),
    "blockwise": partial(Blockwise, POWER),
}
ROUNDING = 2.0**-8
"""Relative error of a sum in bf16, for each rank: its number and the partial sum are rounded, by 2^-9 each.

A number in FP8 with another scale is off by 2^-4."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def parts(x: Tensor, dim: int) -> list[Tensor]:
    return [part.contiguous() for part in x.chunk(dist.get_world_size(), dim)]


def buffers_of(device: str) -> dict[str, Tensor]:
    """The buffers of delayed scaling, with scales that fit the numbers of these tests."""
    found = {name: torch.zeros((), device=device) for name in ("input", "gradient")}
    scales = {"input_scale": 64.0, "gradient_scale": 4096.0}
    return {**found, **{name: torch.full((1,), scale, device=device) for name, scale in scales.items()}}


class Watched(ChunkedCollectives):
    """Chunked collectives that record the bytes of an element of what they gather."""

    def __init__(self, inner: ChunkedCollectives) -> None:
        self.inner, self.num_parts, self.seen = inner, inner.num_parts, list[list[int]]()

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        self.seen.append([part.itemsize for part in parts])
        return self.inner.gathering(*parts, keep=keep)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        self.seen.append([])
        return self.inner.summing(partial, like, produce, fill)


@contextmanager
def watched(around: Boundary) -> Iterator[list[list[int]]]:
    inner = collectives_named(around.chunked)
    watch = Watched(inner)
    name_collectives(around.chunked, watch)
    yield watch.seen
    name_collectives(around.chunked, inner)


def passes(supplier: Products, x: Tensor, weight: Tensor, grad_y: Tensor, narrow: Narrow) -> dict[str, Any]:
    """y, both gradients, whether they are the same when computed separately, saved bytes, statistics."""
    buffers = buffers_of(x.device.type)
    operand = Operand(weight, supplier.cast(weight, buffers))
    y, saved = supplier.forward(x, operand, narrow, buffers)
    sink = Sink(torch.full_like(weight, float("nan"), dtype=torch.float32), torch.ones((), dtype=torch.bool))
    grad_x, returned = supplier.backward(grad_y, operand, saved, sink, narrow, buffers, True)
    again, operands = supplier.dgrad(grad_y, operand, saved, narrow, buffers, True)
    without, more = supplier.dgrad(grad_y, operand, saved, narrow, buffers, False)
    apart = [supplier.wgrad(given, None, narrow, buffers) for given in (operands, more)]
    apart.append(supplier.backward(grad_y, operand, saved, None, narrow, buffers, True)[1])
    assert returned is without is None
    pairs = [(grad_x, again), *((sink.total.to(torch.bfloat16), one) for one in apart)]
    return {
        "y": y,
        "grad_x": grad_x,
        "grad_w": sink.total,
        "same": all(torch.equal(*pair) for pair in pairs),  # type: ignore[arg-type]
        "bytes": sum(tensor.nbytes for tensor in saved if tensor is not x),
        "statistics": [float(buffers[name]) for name in ("input", "gradient")],
    }


def compared(
    shape: tuple[int, ...], recipe: str, around: Boundary, column: bool, device: str = "cpu"
) -> dict[str, Any]:
    """A product between collectives, against the products of all ranks without them, whose sums are exact but for bf16.

    The errors of its results, what it gathered, and the numbers of this rank's input.
    """
    rank, split = dist.get_rank(), collectives_named(around.chunked).num_parts > 1

    def part(tensor: Tensor) -> Tensor:
        return parts(tensor, 1)[rank] if split else tensor

    supplier = RECIPES[recipe](keeps_input=not column)
    narrow = Narrow(before=around) if column else Narrow(after=around)
    shapes = (*shape, NARROW), (*shape, LONG), (LONG, NARROW)
    x, grad, weight = (drawn(*sizes, seed=seed).to(device) for seed, sizes in enumerate(shapes))
    if column:
        inputs, weights, grads = [x] * dist.get_world_size(), parts(weight, 0), parts(grad, 2)
        own = part(x), weights[rank], grads[rank]
    else:
        inputs, weights, grads = parts(grad, 2), parts(weight.t(), 1), [x] * dist.get_world_size()
        own = inputs[rank], weights[rank], part(x)
    alone = [passes(supplier, *tensors, Narrow()) for tensors in zip(inputs, weights, grads, strict=True)]
    with watched(around) as seen:
        found = passes(supplier, *own, narrow)
    summed = "grad_x" if column else "y"
    right = {**alone[rank], summed: part(sum(one[summed].float() for one in alone))}
    errors = {name: far(found.pop(name), right[name]) for name in ("y", "grad_x", "grad_w")}
    return {**found, "errors": errors, "seen": seen, "numbers": own[0].numel(), "largest": alone[rank]["statistics"]}


def far(found: Tensor, right: Tensor) -> float:
    """The largest error relative to the largest number."""
    assert found.shape == right.shape
    return float((found.float() - right.float()).abs().max() / right.float().abs().max())


def everything() -> dict[Any, Any]:
    """All cases, from one start of processes."""
    found: dict[Any, Any] = {}
    for split, shape in [*((True, shape) for shape in SHAPES), (False, SHAPES[0])]:
        around = boundary(dist.group.WORLD, split, name_for(dist.group.WORLD, split))
        for recipe in RECIPES:
            for column in (True, False):
                found[recipe, split, column, shape] = compared(shape, recipe, around, column, "cpu")
    file_memory.install()
    name_collectives("samples", Samples(dist.group.WORLD, torch.device("cpu"), Messages(dist.group.WORLD)))
    around = boundary(dist.group.WORLD, True, "samples")
    for recipe, shape in (("delayed", SHAPES[1]), ("rowwise", SHAPES[1]), ("blockwise", SHAPES[0])):
        for column in (True, False):
            found[recipe, "samples", column, shape] = compared(shape, recipe, around, column, "cpu")
    return found


@cache
def results(ranks: int) -> list[dict[Any, Any]]:
    return run_workers(ranks, everything)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.wide("precision"))])
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return results(request.param)


def test_overlap_changes_no_number_in_fp8_and_sums_are_rounded_as_in_bf16(found: list[dict[Any, Any]]) -> None:
    """A result in bf16 may have another last bit: on a CPU, the order of a product's sums depends on its shapes."""
    ranks = len(found)
    for of_rank in found:
        for (_, _, column, _), case in of_rank.items():
            summed, other = ("grad_x", "y") if column else ("y", "grad_x")
            assert case["errors"][summed] < ranks * ROUNDING
            assert case["errors"][other] < ROUNDING
            assert case["errors"]["grad_w"] < 2.0**-20
            assert case["same"]


def test_parts_travel_in_fp8_if_rows_and_columns_have_one_scale_or_only_rows_are_needed(
    found: list[dict[Any, Any]],
) -> None:
    """Bytes of what each call of chunked collectives gathers, in the order of `passes`; nothing for a sum."""
    for of_rank in found:
        for recipe in RECIPES:
            alone, both = ([1], [1]) if recipe in ("tensorwise", "delayed") else ([1, 4], [2])
            column, row = (of_rank[recipe, True, column, SHAPES[0]]["seen"] for column in (True, False))
            assert column == [alone, both, [], [], both, []]
            assert row == [[], both, both, both]


def test_forward_saves_no_more_than_the_part_of_this_rank(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        for (recipe, _, column, _), case in of_rank.items():
            in_fp8 = column and recipe in ("tensorwise", "delayed")
            assert case["bytes"] == (case["numbers"] + 4 if in_fp8 else 4 * (recipe == "tensorwise"))


def test_statistics_are_those_of_the_numbers_that_a_rank_casts(found: list[dict[Any, Any]]) -> None:
    for split in (True, False):
        for column in (True, False):
            cases = [of_rank["delayed", split, column, SHAPES[0]] for of_rank in found]
            for number in range(2):
                seen, right = ([case[name][number] for case in cases] for name in ("statistics", "largest"))
                assert max(seen) == max(right) > 0


# Whole runs.

DELAYED = {"precisions.fp8.when": "delayed", "precisions.fp8.history": 2, "precisions.fp8.power_of_two": True}
BLOCKS_OF_128 = {"model.hidden_size": 256, "model.num_attention_heads": 4, "model.num_kv_heads": 2}
OF_RECIPE: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "delayed": DELAYED,
    "fused": {**DELAYED, "kernels.norm_product": "fp8", "kernels.activation_product": "fp8"},
    "rowwise": {"precisions.fp8.scaling": "rowwise"},
    "blockwise": {**BLOCKS_OF_128, "precisions.fp8.scaling": "blockwise"},
}
FP8 = {"kernels.linear": "fp8", "trainer.precision": "fp8", "model.num_layers": 3}
OVERLAP = {"parallel.layout": "tp2", "parallel.tp.overlap": True}
BAND = 0.4
"""Maximum relative error of a gradient under tp, that of plugins/kernels/fp8/tests/test_fp8.py without overlap."""
COMPILED = {"trainer.compile": "aot_eager", "memory.recompute.mode": "full"}
wide = pytest.mark.wide("precision")


def outside_of_band(ranks: list[Trace], alone: Trace) -> str:
    """Why a run is not that of one process, or empty: gradients, then losses and norms."""
    for name, band in (("losses", 5e-3), ("norms", 2e-2)):
        for ours, right in zip(getattr(ranks[0], name), getattr(alone, name), strict=True):
            if abs(ours - right) > band * right:
                return f"{name} {ours} and {right}"
    return difference(ranks, alone, BAND)


@cache
def one_process(recipe: str) -> Trace:
    return train_steps({**FP8, **OF_RECIPE[recipe]})


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("delayed", {}),
        *(pytest.param(recipe, {}, marks=wide) for recipe in ("tensorwise", "fused", "rowwise", "blockwise")),
        *(pytest.param(recipe, {"parallel.tp.sequence_parallel": False}, marks=wide) for recipe in OF_RECIPE),
        *(pytest.param(recipe, COMPILED, marks=wide) for recipe in OF_RECIPE),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.wide("precision")
def test_a_run_with_overlap_is_that_of_one_process(recipe: str, changes: dict[str, Any]) -> None:
    ranks = train_ranks(2, {**FP8, **OF_RECIPE[recipe], **OVERLAP, **changes})
    assert outside_of_band(ranks, one_process(recipe)) == ""


# GPUs.


def on_gpus() -> dict[Any, Any]:
    """Be one rank: the cases on GPUs, by copies between them."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    with_nccl()
    peers = Peers(dist.group.WORLD)
    name_collectives("copies", peers)
    name_collectives("samples", Samples(dist.group.WORLD, torch.device("cuda"), peers))
    found: dict[Any, Any] = {}
    for chunked in ("copies", "samples"):
        around = boundary(dist.group.WORLD, True, chunked)
        for recipe in RECIPES:
            for shape in ((4, 128), (3, 96), (1, 4096)):
                for column in (True, False):
                    found[recipe, chunked, column, shape] = compared(shape, recipe, around, column, "cuda")
    return found


def trained(settings: dict[str, Any]) -> tuple[Trace, str]:
    trace = traced(settings)
    used = [type(one.chosen).__name__ for one in COLLECTIVES.values() if isinstance(one, SequenceCollectives)]
    return trace, ",".join(used)


on_two_gpus = pytest.mark.gpu(2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, for the first context of a GPU
@on_two_gpus
def test_copies_between_gpus_change_no_number_in_fp8() -> None:
    for of_rank in run_workers(2, on_gpus):
        for (recipe, _, column, shape), case in of_rank.items():
            errors = dict(case["errors"])
            assert errors.pop("grad_x" if column else "y") < 2 * ROUNDING, (recipe, column, shape)
            # The narrower sums of the tensor cores depend on how a product is divided.
            assert max(errors.values()) < 2 * ROUNDING, (recipe, column, shape)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@on_two_gpus
@pytest.mark.parametrize("compiler", ["never", "inductor"])
@pytest.mark.parametrize("recipe", OF_RECIPE)
def test_two_gpus_give_the_run_of_one_in_fp8_by_copies(recipe: str, compiler: str) -> None:
    settings = {**FP8, **OF_RECIPE[recipe], "trainer.device": "cuda", "trainer.compile": compiler}
    ((alone, _),) = run_workers(1, trained, {**settings, "parallel.layout": ""})
    found = run_workers(2, trained, {**settings, **OVERLAP})
    assert [used for _, used in found] == ["Peers", "Peers"]
    assert outside_of_band([trace for trace, _ in found], alone) == ""
