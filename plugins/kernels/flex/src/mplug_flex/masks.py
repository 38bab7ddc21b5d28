"""Block masks: which blocks of keys a block of queries sees, made without a mask of all pairs.

B batch, S queries, T keys, R blocks of queries, C blocks of keys. flex_attention skips the blocks of pairs in which no
query sees a key, and evaluates its mask function only in blocks that are neither empty nor full. Segments are
consecutive, and so are documents. So the first and the last position of a block say whether it is empty or full. A
block that is empty may count as partial: this costs time, and changes no result.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from mplug_nn.parts import Lengths, Places, numbered, positions_in

BLOCK = 128
"""The number of queries and of keys in a block; torch's default."""
C = TypeVar("C")


@dataclass(frozen=True)
class Form:
    """The static part of a call: equal forms are one program for tensors of equal shapes, strides and dtypes."""

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    bias: str = ""
    packed: bool = False
    grouped: bool = False
    placed: bool = False
    """Whether queries and keys have positions of their own (`Places`); else the queries are the last of the keys."""


@dataclass(frozen=True)
class Mask:
    """A block mask: the attributes of torch's `BlockMask` without its function, and the numbers that it reads.

    `numbers` are int32, in pairs of queries and keys, if the form has them: the numbers of segments [B, S] and [B, T],
    the positions [S] and [T], and the numbers of groups [B, S] and [B, T].
    """

    blocks: tuple[Any, ...]
    numbers: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the attributes, in their order."""
        return [x for x in self.blocks if isinstance(x, Tensor)]

    def blocks_of(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The attributes with other tensors in the place of this mask's."""
        remaining = iter(tensors)
        return tuple(next(remaining) if isinstance(x, Tensor) else x for x in self.blocks)


def mask_of(
    form: Form,
    queries: int,
    keys: int,
    lengths: Lengths | None,
    device: torch.device,
    groups: Tensor | None = None,
    places: Places | None = None,
) -> Mask:
    """The mask of a call; `lengths` are those of the segments of queries and of keys, `groups` [B, S] of the queries.

    `places` are those of a part, with its groups. A mask with groups, or with places and segments, is made in every
    call. Others are made once per process without segments. With segments, they are made once per tensor of lengths, so
    all layers and the backward pass of a micro batch share one, if both tensors of `lengths` are the same one.
    """
    if places is not None:

        def placed() -> Mask:
            positions = (positions_in(one, device).to(torch.int32) for one in (places.queries, places.keys))
            pair = () if places.groups is None else (x.to(torch.int32) for x in places.groups)
            return _mask(form, queries, keys, (*_segments(lengths, queries, keys), *positions, *pair), device)

        if lengths is not None or places.groups is not None:
            return placed()
        return kept((form.causal, form.window, places.queries, places.keys, device), placed, device)
    if groups is not None:
        of_queries = groups.to(torch.int32)
        of_keys = pad(of_queries, (keys - queries, 0), value=-1)
        return _mask(form, queries, keys, (*_segments(lengths, queries, keys), of_queries, of_keys), device)
    key = (form.causal, form.window, queries, keys, device)
    if lengths is None:
        return kept(key, lambda: _mask(form, queries, keys, (), device), device)
    own, others = lengths
    if own is not others or own.is_inference() or capturing(device):
        return _mask(form, queries, keys, _segments(lengths, queries, keys), device)
    version, masks = _OF_LENGTHS.get(own, (None, {}))
    if version != own._version:  # new, or changed in place since
        version, masks = own._version, {}
        _OF_LENGTHS[own] = (version, masks)
    if key not in masks:
        numbers = _numbers(own, queries)
        masks[key] = _mask(form, queries, keys, (numbers, numbers), device)
    found: Mask = masks[key]
    return found


_OF_LENGTHS: Any = WeakTensorKeyDictionary()
"""Tensor of lengths -> (its version, masks by static part); an entry ends with its tensor."""
_KEPT: dict[Hashable, Any] = {}


def kept(key: Hashable, make: Callable[[], C], device: torch.device) -> C:
    """The constant of a key, made at its first use; a constant that a CUDA graph makes belongs to this graph alone."""
    if key in _KEPT:
        value: C = _KEPT[key]
        return value
    value = make()
    if not capturing(device):
        _KEPT[key] = value
    return value


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: it must contain the computation of each value that varies."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _segments(lengths: Lengths | None, queries: int, keys: int) -> tuple[Tensor, ...]:
    return () if lengths is None else (_numbers(lengths[0], queries), _numbers(lengths[1], keys))


def _numbers(lengths: Tensor, length: int) -> Tensor:
    return numbered(lengths, length).to(torch.int32)


def _mask(form: Form, queries: int, keys: int, numbers: tuple[Tensor, ...], device: torch.device) -> Mask:
    some, full = torch.broadcast_tensors(*_blocks(form, queries, keys, numbers, device))
    named: dict[str, Any] = {}
    for name, blocks in (("", some & ~full), ("full_", full)):
        named[f"{name}kv_num_blocks"], named[f"{name}kv_indices"] = _ordered(blocks)
        named[f"{name}q_num_blocks"], named[f"{name}q_indices"] = _ordered(blocks.transpose(-1, -2))
    mask = BlockMask(seq_lengths=(queries, keys), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop_mask, **named)
    return Mask(mask.as_tuple()[:-1], numbers)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [B, 1, R, C] -> int32 (the number of blocks per row [B, 1, R], their columns first [B, 1, R, C])."""
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32).contiguous()


def _blocks(
    form: Form, queries: int, keys: int, numbers: tuple[Tensor, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(blocks in which some query may see a key, blocks in which every query sees every key): [B or 1, 1, R, C]."""
    first_query, last_query = (x[:, None] for x in _ends(queries, device))  # [R, 1]
    first_key, last_key = (x[None, :] for x in _ends(keys, device))  # [1, C]
    begin, end, first, last = _positions(form, numbers, (first_query, last_query, first_key, last_key), keys - queries)
    some, every = [], [last_query - first_query == BLOCK - 1, last_key - first_key == BLOCK - 1]
    if form.causal:
        earlier = first <= end
        some.append(earlier | _grouped(*numbers[-2:]) if form.grouped else earlier)
        every.append(last <= begin)
    if form.window is not None:
        before, after = begin - last, first - end
        some.append(before < form.window if form.grouped else (before < form.window) & (after < form.window))
        every.append(torch.maximum(end - first, last - begin) < form.window)
    if form.packed:
        of_queries, of_keys = numbers[:2]
        first_own, last_own = of_queries[:, first_query], of_queries[:, last_query]  # [B, R, 1]
        first_other, last_other = of_keys[:, first_key], of_keys[:, last_key]  # [B, 1, C]
        some.append((first_own <= last_other) & (first_other <= last_own))
        every.append((first_own == last_own) & (first_other == last_other) & (first_own == first_other))
    all_of = every[0] & every[1]
    some_of = reduce(torch.logical_and, some, torch.ones_like(all_of))
    return _four(some_of), _four(reduce(torch.logical_and, every[2:], all_of))


def _positions(
    form: Form, numbers: tuple[Tensor, ...], ends: tuple[Tensor, ...], shift: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The positions of the first and last query [R, 1] and of the first and last key [1, C] of each block.

    Positions ascend. Without places, the queries come `shift` positions after the first key.
    """
    first_query, last_query, first_key, last_key = ends
    if not form.placed:
        return first_query + shift, last_query + shift, first_key, last_key
    of_queries, of_keys = places_among(form, numbers)
    return of_queries[first_query], of_queries[last_query], of_keys[first_key], of_keys[last_key]


def places_among(form: Form, numbers: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys among the numbers of a mask with places."""
    of_queries, of_keys = numbers[2 * form.packed : 2 * form.packed + 2]
    return of_queries, of_keys


def _grouped(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Blocks that may have a query and a key of one group, by the ranges of groups in them: [B, R, C].

    A block of another range has no such pair.
    """
    least, most = (x[:, :, None] for x in _ranges(of_queries))
    first, last = (x[:, None, :] for x in _ranges(of_keys))
    return (least <= last) & (first <= most)


def _ranges(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number of a group in each block; the range of a block without groups is empty."""
    missing, none = -groups.shape[1] % BLOCK, torch.iinfo(groups.dtype).max
    blocks = pad(groups, (0, missing), value=-1).unflatten(1, (-1, BLOCK))
    return blocks.masked_fill(blocks < 0, none).amin(dim=2), blocks.amax(dim=2)


def _ends(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=length - 1)


def _four(blocks: Tensor) -> Tensor:
    """[R, C] or [B, R, C] -> [B or 1, 1, R, C]."""
    return blocks[None, None] if blocks.dim() == 2 else blocks[:, None]
