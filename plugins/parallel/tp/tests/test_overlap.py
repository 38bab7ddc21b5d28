"""Collectives that overlap with products change no result, and backward keeps only this rank's rows."""

import os
from functools import cache, partial
from typing import Any

import file_memory
import pytest
import torch
import torch.distributed as dist
from gpus import traced
from layout_runs import difference_of
from mplug_tp.boundary import boundary
from mplug_tp.chunked import SequenceCollectives, name_for
from mplug_tp.messages import Messages
from mplug_tp.peers import Peers
from mplug_tp.product import OVERLAPPED
from mplug_tp.samples import Samples, arriving_chunks, leaving_chunks
from mplug_tp.sums import add_up
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mplug.tensors.sink import Weights
from mplug_nn import ChunkedCollectives, Narrow, Operand, Sink, collectives_named
from mplug_nn.chunked_collectives import COLLECTIVES, name_collectives
from mplug_nn.product import apply_product
from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference

I_, H = 6, 12
SHAPES = [(4, 8), (3, 8), (1, 8), (1, 4), (2, 3, 4)]
"""Leading dimensions and the sequence: several samples, an odd number, one, one row a rank at four ranks, two dims."""
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def mlp(
    shape: tuple[int, ...], sequence_parallel: bool, device: str = "cpu", chunked: str = ""
) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of a column- and a row-parallel product: output, gradients of the input and of both weights.

    `chunked` is the name of the collectives; empty: messages.
    """
    part = partial(own, dim=-2) if sequence_parallel else (lambda x: x)
    tensors = drawn(*shape, I_, seed=1), drawn(H, I_, seed=2), drawn(I_, H, seed=3), drawn(*shape, I_, seed=4)
    x, up, down, grad = (tensor.to(device) for tensor in tensors)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, up, down)]
    expected = torch.relu(leaves[0] @ leaves[1].t()) @ leaves[2].t()
    expected.backward(grad)

    around = named(sequence_parallel, chunked)
    local = [leaf.clone().requires_grad_() for leaf in (part(x), own(up, 0), own(down, 1))]
    hidden = torch.relu(apply_product(OVERLAPPED, local[0], Weights(local[1]), Narrow(before=around)))
    found = apply_product(OVERLAPPED, hidden, Weights(local[2]), Narrow(after=around))
    found.backward(part(grad))
    parts = (part(leaves[0].grad), own(leaves[1].grad, 0), own(leaves[2].grad, 1))
    gradients = zip((leaf.grad for leaf in local), parts, strict=True)
    return [(found.detach().cpu(), part(expected).detach().cpu()), *((a.cpu(), b.cpu()) for a, b in gradients)]


def named(sequence_parallel: bool, chunked: str = "") -> Any:
    """A boundary with the chunked collectives of a name; empty: messages."""
    group = dist.group.WORLD
    return boundary(group, sequence_parallel, chunked or name_for(group, sequence_parallel))


# The chunked collectives.


def everything() -> dict[Any, Any]:
    """What the tests below compare, from one start of processes."""
    group = dist.group.WORLD
    found: dict[Any, Any] = {(shape, how): mlp(shape, how) for shape in SHAPES for how in (True, False)}
    file_memory.install()
    name_collectives("samples", Samples(group, torch.device("cpu"), Messages(group)))
    for length in (1, 3, 2):  # the memory grows while slots are in use, and slots are used again
        for shape in ((9, 8), *SHAPES):
            found[shape, "samples", length] = mlp((*shape[:-1], length * shape[-1]), True, chunked="samples")
    return {
        **found,
        "bytes": gathered(collectives_named(name_for(group, True))),
        **separately(),
        "saved": saved_bytes(),
    }


def gathered(chunked: ChunkedCollectives) -> tuple[list[Any], list[Tensor]]:
    """fp8 values and their scales [2, 3, ...], gathered together: (the ranks in the order of arrival, the wholes)."""
    rank, places = dist.get_rank(), []
    values = (torch.arange(24).view(2, 3, 4) + 24.0 * rank).to(torch.float8_e4m3fn)
    scales = torch.full((2, 3, 1), float(rank))
    with chunked.gathering(values, scales, keep=True) as arrival:
        for rows, (chunk, scale) in arrival:
            places.append((rows.positions.start, scale.flatten()[0].item(), chunk.float()))
        wholes = [whole.float() for whole in arrival.whole()]
    return places, wholes


def separately() -> dict[str, Any]:
    """The gradients by `backward`, and by `dgrad` and `wgrad`: with a sink, without, and without a gradient of x."""
    around, found = named(True), dict[str, Any]()
    for column in (True, False):
        narrow = Narrow(before=around) if column else Narrow(after=around)
        x = own(drawn(4, 8, I_, seed=1), 1) if column else own(drawn(4, 8, H, seed=1), 2)
        weight = Operand(own(drawn(H, I_, seed=2), 0) if column else own(drawn(I_, H, seed=2), 1))
        y, kept = OVERLAPPED.forward(x, weight, narrow, {})
        grad, sinks = torch.ones_like(y) * (1 + dist.get_rank()), [Sink(*map(torch.clone, unset(weight))) for _ in "ab"]
        both = OVERLAPPED.backward(grad, weight, kept, sinks[0], narrow, {}, True)
        grad_x, operands = OVERLAPPED.dgrad(grad, weight, kept, narrow, {}, True)
        for sink in (sinks[1], sinks[1]):
            assert OVERLAPPED.wgrad(operands, sink, narrow, {}) is None
        alone = OVERLAPPED.backward(grad, weight, kept, None, narrow, {}, False)
        found["column" if column else "row"] = both, grad_x, [sink.total for sink in sinks], alone
    return found


def unset(weight: Operand) -> tuple[Tensor, Tensor]:
    """A sink whose memory has no values yet."""
    return torch.full_like(weight.values, float("nan")), torch.ones((), dtype=torch.bool)


def saved_bytes() -> dict[str, int]:
    """Bytes that autograd keeps of a column- and of a row-parallel product, without the weights."""
    found = {}
    for name in ("column", "row"):
        kept: list[Tensor] = []
        x = drawn(4, 8 // dist.get_world_size() if name == "column" else 8, I_, seed=1).requires_grad_()
        weight = drawn(H, I_, seed=2).requires_grad_()
        narrow = Narrow(before=named(True)) if name == "column" else Narrow(after=named(True))
        with saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor):
            apply_product(OVERLAPPED, x, Weights(weight), narrow)
        found[name] = sum(tensor.nbytes for tensor in kept if tensor.data_ptr() != weight.data_ptr()) - x.nbytes
    return found


@cache
def results(ranks: int) -> list[dict[Any, Any]]:
    return run_workers(ranks, everything)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.wide("layouts"))])
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return results(request.param)


def test_products_and_gradients_are_those_of_one_process(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        for shape in SHAPES:
            if shape[-1] % len(found) == 0:
                for given, wanted in (*of_rank[shape, True], *of_rank[shape, False]):
                    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


def test_products_in_whole_samples_are_those_of_one_process(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        cases = [pairs for key, pairs in of_rank.items() if "samples" in key[1:]]
        assert len(cases) == 3 * (1 + len(SHAPES))
        for given, wanted in (pair for pairs in cases for pair in pairs):
            torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("samples", [2, 3, 4, 9])
def test_chunks_have_each_sample_once(samples: int) -> None:
    for chunks in (arriving_chunks(samples), leaving_chunks(samples)):
        assert [number for chunk in chunks for number in range(samples)[chunk]] == list(range(samples))
        assert all(range(samples)[chunk] for chunk in chunks)
    assert leaving_chunks(samples)[-1] == slice(samples - 1, samples)


def test_tensors_of_any_dtypes_are_gathered_together_own_rows_first(found: list[dict[Any, Any]]) -> None:
    size = len(found)
    for rank, of_rank in enumerate(found):
        places, (values, scales) = of_rank["bytes"]
        sent = [(torch.arange(24).view(2, 3, 4) + 24.0 * of).to(torch.float8_e4m3fn).float() for of in range(size)]
        for step, (start, scale, chunk) in enumerate(places):
            of = (rank - step) % size
            assert (start, scale) == (3 * of, of)
            assert torch.equal(chunk, sent[of])
        assert torch.equal(values, torch.cat(sent, 1))
        assert scales[:, :, 0].tolist() == [[float(of) for of in range(size) for _ in range(3)]] * 2


@pytest.mark.parametrize("kind", ["column", "row"])
def test_both_gradients_at_once_are_bitwise_the_separate_ones(found: list[dict[Any, Any]], kind: str) -> None:
    for of_rank in found:
        (grad_x, nothing), separate, (once, twice), alone = of_rank[kind]
        assert nothing is None
        assert torch.equal(grad_x, separate)
        # The second product is added to a sink that is not stale: some processors round the sum once, others twice.
        torch.testing.assert_close(twice, 2 * once, rtol=1e-14, atol=1e-14)
        assert alone[0] is None
        assert torch.equal(alone[1], once)


def test_backward_keeps_only_the_rows_of_this_rank(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        assert of_rank["saved"] == {"column": 0, "row": 0}


# Whole runs.

OVERLAP: dict[str, Any] = {"parallel.tp.overlap": True}
WHOLE, COMPILED = "parallel.tp.sequence_parallel=false", "trainer.compile=aot_eager"
LAYOUTS = [
    *("tp4", f"tp2 {WHOLE}", f"tp2 {COMPILED} memory.recompute.mode=full"),
    *(f"tp2 {WHOLE} {COMPILED} memory.recompute.mode=full", f"tp2pp2 {COMPILED} {WHOLE}"),
    "tp2 model.tie_embeddings=true model.bias=true model.activation=swiglu",
    *(f"tp2{other}2" for other in ("pp", "zero", "cp", "dp", "fsdp")),
    "tp2zero2 parallel.zero.stage=2",
]


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.wide("layouts")  # the suite has two quick cases (test_tp.py)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_overlap_is_that_of_one_process(layout: str) -> None:
    assert difference_of(layout, OVERLAP) == ""


def by_samples() -> None:
    """Let this process use chunks of whole samples, in memory that processes on a CPU share."""
    file_memory.install()
    SequenceCollectives._choose = lambda self, device: Samples(self._group, device, Messages(self._group))  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    "layout", ["tp4", f"tp2 {COMPILED} memory.recompute.mode=full", "tp2pp2", "tp2zero2", "tp2cp2"]
)
def test_a_run_in_whole_samples_is_that_of_one_process(layout: str) -> None:
    settings = {**OVERLAP, "trainer.micro_batch_size": 2, "trainer.global_batch_size": 4}
    assert difference_of(layout, settings, by_samples) == ""


# GPUs.


def on_gpus() -> dict[Any, Any]:
    """Be one rank; several ranks may share a GPU."""
    os.environ.update(NO_MULTICAST)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    peers = Peers(dist.group.WORLD)
    name_collectives("copies", peers)
    name_collectives("samples", Samples(dist.group.WORLD, torch.device("cuda"), peers))
    found: dict[Any, Any] = {}
    for chunked in ("copies", "samples"):
        for round_ in range(20):  # shapes that grow and shrink, so that slots are used again before and after they grow
            for shape in SHAPES[:3]:
                grown = (*shape[:-1], 64 * shape[-1] * (1 + round_ % 3))
                found[chunked, round_, shape] = mlp(grown, True, "cuda", chunked)
    return found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, for the first context of a GPU
@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_between_gpus_give_the_results_of_one_process(ranks: int) -> None:
    for of_rank in run_workers(ranks, on_gpus):
        for pairs in of_rank.values():
            for given, wanted in pairs:
                torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_pass_adds_the_products_of_all_ranks_in_their_order(size: int, dtype: torch.dtype) -> None:
    for rank in range(size):
        products, sent = (torch.randn(5, size * 7, 1000, device="cuda").to(dtype) for _ in range(2))
        own, arrived = products[1:4, 7 * rank : 7 * rank + 7], sent.view(5, size, 7, 1000).transpose(0, 1)[1:].clone()
        total = own.new_empty(own.shape)
        add_up(total, own, arrived[:, 1:4], rank)
        terms = [own if of == rank else arrived[(rank - of) % size - 1, 1:4] for of in range(size)]
        assert torch.equal(total, sum(term.float() for term in terms).to(dtype))


def trained(settings: dict[str, Any]) -> tuple[Trace, str]:
    """Be one rank: (its trace, the class of the collectives that it used)."""
    trace = traced(settings)
    used = [type(one.chosen).__name__ for one in COLLECTIVES.values() if isinstance(one, SequenceCollectives)]
    return trace, ",".join(used)


@pytest.mark.gpu(2)
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("compiler", ["never", "inductor"])
@pytest.mark.parametrize(("chunks", "name"), [("ranks", "Peers"), ("samples", "Samples")])
def test_two_gpus_give_the_run_of_one_process_by_copies(chunks: str, name: str, compiler: str) -> None:
    settings = {"trainer.device": "cuda", "trainer.precision": "fp32", "trainer.compile": compiler}
    reference = run_workers(1, trained, {**settings, "parallel.layout": ""})[0][0]
    settings |= {**OVERLAP, "parallel.tp.chunks": chunks}
    found = run_workers(2, trained, {**settings, "parallel.layout": "tp2"})
    assert [used for _, used in found] == [name, name]
    assert difference([trace for trace, _ in found], reference, 1e-5) == ""
