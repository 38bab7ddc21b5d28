"""The attention of two and four ranks is that of one, in fp64, forward and backward, by every method.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from mplug_cp.exchange import exchanged
from mplug_cp.gathered import gathered_of
from mplug_cp.head_chunks import chunked
from mplug_cp.ring import ring_of
from mplug_cp.wraps import by_parts
from mplug_cp.zigzag import zigzag
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug import contiguous
from mplug_nn import AttentionInputs, AttentionSpec, parts_of
from mplug_nn.attention import DOT_PRODUCT, scaled_dot_product
from mplug_testing import run_workers

B, S, H, K = 2, 48, 4, 6
LENGTHS = ((17, 1, 6, 13, 11, 0), (1, 22, 2, 1, 1, 21))
"""Documents of odd lengths, some on both sides of a border, some of one token, one on all ranks."""


class Case(NamedTuple):
    """The method, what attention computes, and the number of KV heads."""

    method: str
    spec: AttentionSpec
    kv_heads: int


PLAIN = [
    (AttentionSpec(0.7, K, K, causal=causal, documents=packed), groups)
    for causal, packed, groups in product((True, False), (False, True), (4, 2, 1))
]
BY_POSITION = [
    (AttentionSpec(0.7, K, K, window=5), 2),
    (AttentionSpec(0.7, K, K, window=17, documents=True, sinks=True), 4),
    (AttentionSpec(0.7, K, K, sinks=True), 1),
    (AttentionSpec(0.7, K, K, causal=False, window=4, documents=True), 2),
    (AttentionSpec(0.7, K, K, position_groups=True), 2),
    (AttentionSpec(0.7, K, K, position_groups=True, window=3, documents=True), 4),
]
"""Windows and groups that cross the borders of chunks, and attention sinks."""
SPECIFIED = [
    (AttentionSpec(0.7, K, K, window=3, soft_cap=2.0, sinks=True, bias="alibi"), 2),
    (AttentionSpec(0.7, K, K, causal=False, documents=True, bias="relative"), 2),
]
"""Heads that travel take their sinks, biases and windows along."""
CHUNKED = [
    (AttentionSpec(0.7, K, K), 4),
    (AttentionSpec(0.7, K, K, documents=True, sinks=True), 4),
    (AttentionSpec(0.7, K, K, causal=False, documents=True), 1),
]
"""Two KV heads for each of two ranks, or one, which is a single chunk."""
GROUPS = ((8, 3), (15, 13), (29, 11), (41, 2))
"""The first position and the length of each group; the second one contains a whole chunk of four ranks."""


def groups_of_positions() -> Tensor:
    """The number of each position's group, or -1: [B, S]; those of the second sample begin one position later."""
    found = torch.full((B, S), -1)
    for sample in range(B):
        for number, (begin, length) in enumerate(GROUPS):
            found[sample, begin + sample : begin + sample + length] = number
    return found


def differentiated(core: Callable[..., Tensor], case: Case, held: list[int]) -> tuple[dict[str, Tensor], ...]:
    """(output and gradients by position, gradients of what heads have) of the positions that are held."""
    spec, generator = case.spec, torch.Generator().manual_seed(case.kv_heads)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    *qkv, gradient = (drawn(B, S, heads, K) for heads in (H, case.kv_heads, case.kv_heads, H))
    leaves = [x[:, held].clone().requires_grad_() for x in qkv]
    tables = {"sinks": drawn(H) if spec.sinks else None, "bias_table": drawn(H, 5) if spec.bias == "relative" else None}
    trained = {name: x.requires_grad_() for name, x in tables.items() if x is not None}
    documents = torch.tensor(LENGTHS) if spec.documents else None
    groups = groups_of_positions() if spec.position_groups else None
    output = core(*leaves, spec, AttentionInputs(None, documents, **trained, num_heads=H, position_groups=groups))
    found = torch.autograd.grad(output, [*leaves, *trained.values()], gradient[:, held])
    by_position = dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *found), strict=False))
    return by_position, dict(zip(trained, found[3:], strict=True))


def distributed(method: str, size: int, rank: int) -> tuple[Callable[..., Tensor], list[int]]:
    """A rank's core, and the positions that it holds."""
    if method == "ulysses":
        held = [p for part in contiguous(S, size, rank) for p in part]
        return exchanged(dist.group.WORLD, size, rank, scaled_dot_product), held
    if method == "chunks":
        held = [p for part in contiguous(S, size, rank) for p in part]
        return chunked(dist.group.WORLD, size, rank, 2, DOT_PRODUCT), held
    if method == "hierarchical":  # two neighbours exchange heads, the pairs make a ring
        rings, pairs = ([dist.new_group(ranks) for ranks in both] for both in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]))
        held = [p for part in zigzag(S, 2, rank // 2) for p in part]
        ring = by_parts(ring_of, rings[rank % 2], DOT_PRODUCT)
        return exchanged(pairs[rank // 2], 2, rank % 2, ring), held[rank % 2 * len(held) // 2 :][: len(held) // 2]
    operator_of = {"ring": ring_of, "all_gather": gathered_of}[method]
    return by_parts(operator_of, dist.group.WORLD, DOT_PRODUCT), [p for part in zigzag(S, size, rank) for p in part]


def of_a_rank(cases: list[Case]) -> list[tuple[list[int], tuple[dict[str, Tensor], ...]]]:
    """Of every case, the positions that this rank holds, and its part of the result."""
    cores = [distributed(case.method, dist.get_world_size(), dist.get_rank()) for case in cases]
    return [(held, differentiated(core, case, held)) for case, (core, held) in zip(cases, cores, strict=True)]


@pytest.mark.parametrize(
    ("size", "methods"),
    [(2, ("ring", "all_gather", "ulysses")), (4, ("ring", "all_gather", "ulysses", "hierarchical"))],
)
@pytest.mark.wide("layouts", quick=["2-methods0"])
def test_ranks_together_compute_the_attention_of_one(size: int, methods: tuple[str, ...]) -> None:
    cases = [
        Case(method, *one) for method in methods for one in PLAIN + BY_POSITION + SPECIFIED * (method == "ulysses")
    ]
    cases += [Case("chunks", *one) for one in CHUNKED if size == 2]
    for case, *ranks in zip(cases, *run_workers(size, of_a_rank, cases), strict=True):
        by_position, by_head = differentiated(scaled_dot_product, case, list(range(S)))
        for name, right in by_position.items():
            whole = torch.full_like(right, torch.nan)
            for held, (found, _) in ranks:
                whole[:, held] = found[name]
            assert float((whole - right).abs().max()) < 1e-12, f"{case}: {name}"
        assert bool(by_head) == bool(case.spec.sinks or case.spec.bias)
        for name, right in by_head.items():
            assert float((sum(found[name] for _, (_, found) in ranks) - right).abs().max()) < 1e-12, f"{case}: {name}"


@pytest.mark.parametrize("operator_of", [ring_of, gathered_of])
def test_a_compiler_is_told_the_shapes_of_results_and_gradients(operator_of: Callable[..., Any]) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(B, S, heads, K, requires_grad=True) for heads in (H, 2, 2))
        sinks = torch.empty(H, requires_grad=True)
        operator = operator_of(parts_of(DOT_PRODUCT))
        output, sums, *kept = operator(q, k, v, None, None, sinks, 0.7, True, None, "group")
        gradients = torch.autograd.grad(output, (q, k, v, sinks), output)
    assert (output.shape, sums.shape) == (q.shape, (B, H, S))
    assert [tuple(x.shape) for x in kept] == [(2, *k.shape)] * (operator_of is ring_of), "a ring keeps the last keys"
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, sinks)]


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
