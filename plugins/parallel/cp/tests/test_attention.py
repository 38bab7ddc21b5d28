"""The attention of two and four ranks is that of one, in fp64, forward and backward, by every method.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from mplug_cp.exchange import exchanged
from mplug_cp.gathered import gathered_of
from mplug_cp.ring import ring_of
from mplug_cp.wraps import by_parts
from mplug_cp.zigzag import zigzag
from torch import Tensor

from mplug import contiguous
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import DOT_PRODUCT, scaled_dot_product
from mplug_testing import run_workers

B, S, H, K = 2, 48, 4, 6
LENGTHS = ((17, 1, 6, 13, 11, 0), (1, 22, 2, 1, 1, 21))
"""Documents of odd lengths, some on both sides of a border, some of one token, one on all ranks."""


@dataclass(frozen=True)
class Case:
    """What is tried: the method, whether the mask is causal, whether there are documents, KV heads."""

    method: str
    causal: bool
    packed: bool
    kv_heads: int


def cases(*methods: str) -> list[Case]:
    return [Case(*one) for one in product(methods, (True, False), (False, True), (4, 2, 1))]


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """q, k and v of the whole sequence, and the output's gradient."""
    generator = torch.Generator().manual_seed(case.kv_heads)
    heads = (H, case.kv_heads, case.kv_heads, H)
    *qkv, gradient = (torch.randn(B, S, n, K, dtype=torch.float64, generator=generator) for n in heads)
    return qkv, gradient


def options(case: Case) -> tuple[AttentionSpec, AttentionInputs]:
    documents = torch.tensor(LENGTHS) if case.packed else None
    return AttentionSpec(0.7, K, K, causal=case.causal, documents=case.packed), AttentionInputs(None, documents)


def distributed(case: Case, size: int, rank: int) -> tuple[object, list[int]]:
    """A rank's core, and the positions that it holds."""
    if case.method == "ulysses":
        held = [p for part in contiguous(S, size, rank) for p in part]
        return exchanged(dist.group.WORLD, size, rank, scaled_dot_product), held
    if case.method == "hierarchical":  # two neighbours exchange heads, the pairs make a ring
        rings, pairs = (
            [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])],
            [dist.new_group(r) for r in ([0, 1], [2, 3])],
        )
        held = [p for part in zigzag(S, 2, rank // 2) for p in part]
        ring = by_parts(ring_of, rings[rank % 2], DOT_PRODUCT)
        return exchanged(pairs[rank // 2], 2, rank % 2, ring), held[rank % 2 * len(held) // 2 :][: len(held) // 2]
    operator_of = {"ring": ring_of, "all_gather": gathered_of}[case.method]
    return by_parts(operator_of, dist.group.WORLD, DOT_PRODUCT), [p for part in zigzag(S, size, rank) for p in part]


def parts_of_a_rank(tried: list[Case]) -> list[tuple[list[int], list[Tensor]]]:
    """Of every case, the positions that this rank holds, and of them the output, dq, dk and dv."""
    found = []
    for case in tried:
        core, held = distributed(case, dist.get_world_size(), dist.get_rank())
        qkv, gradient = inputs(case)
        leaves = [x[:, held].clone().requires_grad_() for x in qkv]
        output = core(*leaves, *options(case))  # type: ignore[operator]
        gradients = torch.autograd.grad(output, leaves, gradient[:, held])
        found.append((held, [output.detach(), *gradients]))
    return found


@pytest.mark.parametrize(
    ("size", "methods"),
    [(2, ("ring", "all_gather", "ulysses")), (4, ("ring", "all_gather", "ulysses", "hierarchical"))],
)
def test_ranks_together_compute_the_attention_of_one(size: int, methods: tuple[str, ...]) -> None:
    tried = cases(*methods)
    for case, *ranks in zip(tried, *run_workers(size, parts_of_a_rank, tried), strict=True):
        qkv, gradient = inputs(case)
        leaves = [x.requires_grad_() for x in qkv]
        output = scaled_dot_product(*leaves, *options(case))
        exact = [output.detach(), *torch.autograd.grad(output, leaves, gradient)]
        for name, right, number in zip(("output", "dq", "dk", "dv"), exact, range(4), strict=True):
            whole = torch.full_like(right, torch.nan)
            for held, found in ranks:
                whole[:, held] = found[number]
            error = float((whole - right).abs().max())
            assert error < 1e-12, f"{case}: {name} is off by {error:.3g}"


SPECIFIED = [
    AttentionSpec(0.7, K, K, window=3, soft_cap=2.0, sinks=True, bias="alibi"),
    AttentionSpec(0.7, K, K, causal=False, documents=True, bias="relative"),
]


def tables(spec: AttentionSpec) -> AttentionInputs:
    """What comes with a specification, of the whole model's heads."""
    generator = torch.Generator().manual_seed(7)
    sinks, table = (torch.randn(H, *more, dtype=torch.float64, generator=generator) for more in ((), (5,)))
    documents = torch.tensor(LENGTHS) if spec.documents else None
    trained = (sinks if spec.sinks else None, table if spec.bias == "relative" else None)
    return AttentionInputs(None, documents, *(x if x is None else x.requires_grad_() for x in trained), num_heads=H)


def differentiated(
    core: Callable[..., Tensor], spec: AttentionSpec, held: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs and gradients by position, and the gradients by head, of the positions that are held."""
    qkv, gradient = inputs(Case("", True, False, 2))
    leaves, given = [x[:, held].clone().requires_grad_() for x in qkv], tables(spec)
    output = core(*leaves, spec, given)
    trained = {name: x for name, x in given._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
    found = torch.autograd.grad(output, [*leaves, *trained.values()], gradient[:, held])
    by_position = dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *found), strict=False))
    return by_position, dict(zip(trained, found[3:], strict=True))


def specified_of_a_rank() -> list[tuple[list[int], dict[str, Tensor], dict[str, Tensor]]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    held = [p for part in contiguous(S, size, rank) for p in part]
    core = exchanged(dist.group.WORLD, size, rank, scaled_dot_product)
    return [(held, *differentiated(core, spec, held)) for spec in SPECIFIED]


def test_heads_that_travel_take_their_sinks_biases_and_windows_along() -> None:
    for spec, *ranks in zip(SPECIFIED, *run_workers(2, specified_of_a_rank), strict=True):
        by_position, by_head = differentiated(scaled_dot_product, spec, list(range(S)))
        for name, right in by_position.items():
            whole = torch.full_like(right, torch.nan)
            for held, found, _ in ranks:
                whole[:, held] = found[name]
            assert float((whole - right).abs().max()) < 1e-12, f"{spec}: {name}"
        assert by_head, spec
        for name, right in by_head.items():
            assert float((sum(one[name] for _, _, one in ranks) - right).abs().max()) < 1e-12, f"{spec}: {name}"


def test_the_cases_have_documents_over_borders_of_every_kind() -> None:
    for lengths, size in product(LENGTHS, (2, 4)):
        ends = set(torch.tensor(lengths).cumsum(0).tolist())
        borders = {part.start for index in range(size) for part in zigzag(S, size, index)} - {0}
        assert sum(lengths) == S
        assert borders - ends, "a document on both sides of a border"
    assert any(length % 2 for lengths in LENGTHS for length in lengths)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "copies"), [(4, 1, 2, 2), (6, 3, 2, 2), (8, 2, 2, 1), (12, 4, 6, 3)]
)
@pytest.mark.parametrize("length", [3, 8])
def test_kv_heads_are_copied_as_often_as_their_query_heads_need_whatever_the_length(
    heads: int, kv_heads: int, size: int, copies: int, length: int
) -> None:
    """Worked out by hand: of 6 heads, 3 a rank, and 3 KV heads, each has 2 query heads, and the second is cut."""
    seen = []

    def inner(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        seen.append((q.shape[2], k.shape[2], v.shape[2]))
        return q

    core = exchanged(None, size, 0, inner)  # without a group, an exchange returns what it gets
    q, kv = torch.zeros(1, length, heads, K), torch.zeros(1, length, kv_heads, K)
    core(q, kv, kv, AttentionSpec(1.0, K, K, causal=True), AttentionInputs())
    assert seen == [(heads, kv_heads * copies, kv_heads * copies)]
