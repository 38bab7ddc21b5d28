"""A vocabulary divided over ranks gives what the whole one gives."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_tp.vocabulary import VocabularyParallel
from torch import Tensor
from torch.nn import functional as F

import mplug_ops as ops
from mplug_nn.loss import IGNORED
from mplug_testing import run_workers

B, S, D = 2, 5, 6
SIZES = [8, 10, 9, 5]
"""Over 4 ranks: 2 rows each; a last rank of one row; a last rank of none; a rank of one and a rank of none."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indices(size: int) -> Tensor:
    """Every row, as far as they fit."""
    return torch.arange(B * S).remainder(size).view(B, S).flip(1)


def labels_of(kind: str, size: int) -> Tensor:
    labels = indices(size)
    if kind == "some ignored":
        labels[0, 1], labels[1, 3:] = IGNORED, IGNORED
    return torch.full_like(labels, IGNORED) if kind == "all ignored" else labels


def rows(size: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """(first row, rows, rows of padding) of a rank: equal shares, rounded up, until there are no more."""
    each = -(-size // ranks)
    held = min(max(size - rank * each, 0), each)
    return rank * each, held, each - held


def part(table: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's rows, and below them padding that must never be read."""
    first, held, padding = rows(len(table), ranks, rank)
    return torch.cat([table[first : first + held], torch.full((padding, table.shape[1]), 7.0, dtype=table.dtype)])


def assert_parts(grads: list[Tensor], whole: Tensor, tolerance: float) -> None:
    """Each rank has its rows of the whole gradient, and zeros for padding."""
    for rank, grad in enumerate(grads):
        first, held, padding = rows(len(whole), len(grads), rank)
        torch.testing.assert_close(grad[:held], whole[first : first + held], rtol=tolerance, atol=tolerance)
        assert torch.equal(grad[held:], torch.zeros(padding, grad.shape[1], dtype=grad.dtype))


# Looking up.


def looked_up(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    weight = part(drawn(size, D, seed=1).to(dtype), group.size(), group.rank()).requires_grad_()
    x = ops.reduce(VocabularyParallel(group, size).lookup(indices(size), weight), group)
    x.backward(drawn(B, S, D, seed=2).to(dtype))
    return x.detach(), weight.grad


DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_looking_up_is_that_of_the_whole_table(size: int, ranks: int, dtype: torch.dtype) -> None:
    table = drawn(size, D, seed=1).to(dtype).requires_grad_()
    wanted = F.embedding(indices(size), table)
    wanted.backward(drawn(B, S, D, seed=2).to(dtype))
    results = [rank[size, dtype] for rank in found(ranks)]
    for x, _ in results:
        assert torch.equal(x, wanted)  # one rank's row, and zeros
    assert_parts([grad for _, grad in results], table.grad, 1e-6)


# Cross-entropy.


def cross_entropy(size: int, kind: str, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss sum, number of targets, gradient of hidden, gradient of this rank's rows)."""
    group = dist.group.WORLD
    hidden = (drawn(B, S, D, seed=3) * scale).to(dtype).requires_grad_()
    weight = part(drawn(size, D, seed=1).to(dtype), group.size(), group.rank()).requires_grad_()
    loss, count = VocabularyParallel(group, size).cross_entropy(
        hidden, lambda h: ops.copy(h, group) @ weight.t(), labels_of(kind, size)
    )
    (3 * loss).backward()
    return loss.detach(), count, hidden.grad, weight.grad


def whole_cross_entropy(size: int, kind: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64: (loss sum, gradient of hidden, gradient of the table)."""
    hidden = (drawn(B, S, D, seed=3) * scale).requires_grad_()
    table = drawn(size, D, seed=1).requires_grad_()
    logits = (hidden @ table.t()).flatten(0, 1)
    loss = F.cross_entropy(logits, labels_of(kind, size).flatten(), ignore_index=IGNORED, reduction="sum")
    (3 * loss).backward()
    return loss.detach(), hidden.grad, table.grad


KINDS = {"none ignored": 10, "some ignored": 7, "all ignored": 0}


def everything() -> dict[tuple[int, Any], tuple[Tensor, ...]]:
    looked = {(size, dtype): looked_up(size, dtype) for size in SIZES for dtype in DTYPES}
    return looked | {(size, kind): cross_entropy(size, kind, 1.0, torch.float64) for size in SIZES for kind in KINDS}


@cache
def found(ranks: int) -> list[dict[tuple[int, Any], tuple[Tensor, ...]]]:
    return run_workers(ranks, everything)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_the_loss_and_its_gradients_are_those_of_the_whole_vocabulary(size: int, ranks: int, kind: str) -> None:
    wanted, grad_hidden, grad_table = whole_cross_entropy(size, kind, 1.0)
    results = [rank[size, kind] for rank in found(ranks)]
    for loss, count, grad, _ in results:
        assert loss.dtype is torch.float64
        assert count.dtype is torch.int64
        assert count == KINDS[kind]
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, grad_hidden, rtol=1e-12, atol=1e-12)
    assert_parts([grad for *_, grad in results], grad_table, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "kind", "scale", "tolerance"),
    [
        (torch.float32, "some ignored", 1.0, 1e-5),
        (torch.bfloat16, "some ignored", 1.0, 3e-2),
        (torch.float64, "none ignored", 1e3, 1e-12),  # logits of thousands do not overflow
    ],
    ids=str,
)
def test_activations_of_other_formats_and_large_ones_give_the_loss(
    dtype: torch.dtype, kind: str, scale: float, tolerance: float
) -> None:
    wanted, grad_hidden, _ = whole_cross_entropy(10, kind, scale)
    for loss, _, grad, _ in run_workers(2, cross_entropy, 10, kind, scale, dtype):
        assert (loss.dtype, grad.dtype) == (torch.promote_types(dtype, torch.float32), dtype)
        torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=tolerance)
        wide = tolerance if dtype is torch.float64 else 10 * tolerance
        torch.testing.assert_close(grad.double(), grad_hidden, rtol=wide, atol=wide)


def test_one_rank_has_the_whole_vocabulary() -> None:
    vocabulary, hidden, table = VocabularyParallel(None, 10), drawn(B, S, D, seed=3), drawn(10, D, seed=1)
    labels = labels_of("some ignored", 10)
    assert torch.equal(vocabulary.lookup(indices(10), table), F.embedding(indices(10), table))
    loss, count = vocabulary.cross_entropy(hidden, lambda h: h @ table.t(), labels)
    torch.testing.assert_close(loss, whole_cross_entropy(10, "some ignored", 1.0)[0], rtol=1e-12, atol=1e-12)
    assert count == 7
