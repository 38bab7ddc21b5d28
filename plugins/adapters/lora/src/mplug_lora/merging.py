"""Weights with their adapters multiplied in, for export. Everything is computed in at least fp32.

n pairs of ranges of outputs; a rank r, I inputs, O outputs. W [O, I], A [n r, I], B of a pair [O_i, r].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mplug_lora.targets import Target
from mplug_pretrained import Merge, RowNorms, row_norms


def wide(x: Tensor) -> Tensor:
    """x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def merge_of(target: Target, rank: int, scale: float, dora: bool) -> Merge:
    """How the weight of a target is computed from itself and its adapter."""
    if target.is_experts:
        place = f"{target.name}_adapter"
        return Merge((target.weight, f"{place}.a", f"{place}.b"), partial(_merged_experts, scale))
    place = f"{target.name}.adapter"
    ups = [f"{place}.b{number}.weight" for number in target.chosen]
    magnitudes = [f"{place}.magnitude{number}" for number in target.chosen] if dora else []
    lengths = tuple(pair.length for pair in target.pairs)
    compute = partial(_merged, lengths, target.chosen, rank, scale)
    return Merge((target.weight, f"{place}.a.weight", *ups, *magnitudes), compute)


def _merged_experts(scale: float, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return wide(weight) + scale * (wide(b) @ wide(a))


def _merged(
    lengths: Sequence[int],
    chosen: Sequence[int],
    rank: int,
    scale: float,
    weight: Tensor,
    a: Tensor,
    *rest: Tensor,
) -> Tensor:
    """`rest` are the B of the chosen pairs, and with DoRA then the changes of their magnitudes."""
    ups, changes = rest[: len(chosen)], rest[len(chosen) :]
    parts = list(wide(weight).split(list(lengths)))
    for place, number in enumerate(chosen):
        base = parts[number]
        merged = base + scale * (wide(ups[place]) @ wide(a[place * rank : (place + 1) * rank]))
        if changes:
            magnitude = row_norms(base) + wide(changes[place])
            merged = merged * (magnitude / row_norms(merged))[:, None]
        parts[number] = merged
    return torch.cat(parts)


def norms_of(target: Target, number: int) -> RowNorms:
    """The norms to which the magnitude of a pair adds: those of the pair's rows of the weight."""
    start = sum(pair.length for pair in target.pairs[:number])
    return RowNorms(target.weight, start, target.pairs[number].length)
