"""Which keys a query sees, as an interval of keys.

B batch, S queries, T keys, N segments of a sample.

A causal mask, a window, documents and groups of positions together leave each query an interval of consecutive keys.
Both ends of the interval do not decrease from one query to the next. So each key is seen by an interval of queries, and
the tiles that a kernel must visit are known without a mask of all pairs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from mplug_nn.parts import Lengths, Places, positions_in


class Sight(NamedTuple):
    """Query s of sample b sees the keys `first[b, s]` to `end[b, s]` - 1. Both are int32 [1 or B, S] and ascend."""

    first: Tensor
    end: Tensor


class Mask(NamedTuple):
    """What hides keys from queries.

    `lengths` are those of the segments of queries and of keys. `groups` [B, S] are the groups of the queries, if they
    are the last of the keys. Queries and keys elsewhere have `places`, with a window and groups of their own. The
    positions of `places` ascend.
    """

    causal: bool
    window: int | None = None
    lengths: Lengths | None = None
    groups: Tensor | None = None
    places: Places | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Its static part."""
        places = self.places
        return self.causal, self.window, None if places is None else (places.queries, places.keys, places.window)

    @property
    def varies(self) -> bool:
        """Whether it has groups, which come with every call."""
        return self.groups is not None or (self.places is not None and self.places.groups is not None)


def sight_of(mask: Mask, queries: int, keys: int, device: torch.device) -> Sight:
    """The sight of a call.

    A sight without segments and groups is made once per process. One with segments is made once per tensor of lengths,
    so all layers and the backward pass of a micro batch share it. A CUDA graph that is captured makes its own.
    """

    def make() -> Sight:
        return _sight(mask, queries, keys, device)

    if mask.varies or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make()
    key = (mask.key, queries, keys, device)
    if mask.lengths is None:
        return _kept(_KEPT, key, make)
    own, others = mask.lengths
    if own is not others or own.is_inference():
        return make()
    version, sights = _OF_LENGTHS.get(own, (None, {}))
    if version != own._version:  # new, or changed in place since
        version, sights = own._version, {}
        _OF_LENGTHS[own] = (version, sights)
    return _kept(sights, key, make)


def ranges_of(sight: Sight, keys: int, tile: int) -> Tensor:
    """For each tile of keys, four numbers of queries: int32 [1 or B, tiles, 4].

    They are the first query that sees a key of the tile, the first and the end of those that see all of them, and the
    end of those that see one. In the last tile, the keys are those that exist.
    """
    first, end = sight
    starts = torch.arange(0, keys, tile, device=first.device, dtype=torch.int32)
    ends = (starts + tile).clamp(max=keys)
    starts, ends = (x.expand(len(first), -1).contiguous() for x in (starts, ends))
    bounds = (
        torch.searchsorted(end, starts, right=True, out_int32=True),  # the queries before it see earlier keys only
        torch.searchsorted(end, ends, out_int32=True),
        torch.searchsorted(first, starts, right=True, out_int32=True),
        torch.searchsorted(first, ends, out_int32=True),  # those from here on see later keys only
    )
    return torch.stack(bounds, dim=-1)


_KEPT: dict[Any, Sight] = {}
_OF_LENGTHS: Any = WeakTensorKeyDictionary()
"""Tensor of lengths -> (its version, sights by static part); an entry ends with its tensor."""
MOST_KEPT = 64
"""Sights that are kept at a time: shapes that vary with every step must not fill the memory."""


def _kept(sights: dict[Any, Sight], key: Any, make: Callable[[], Sight]) -> Sight:
    if key not in sights:
        if len(sights) >= MOST_KEPT:
            sights.clear()
        sights[key] = make()
    return sights[key]


def _sight(mask: Mask, queries: int, keys: int, device: torch.device) -> Sight:
    first, end = _by_index(mask, queries, keys, device) if mask.places is None else _placed(mask, mask.places, device)
    if mask.lengths is not None:
        begins, ends = _of_segments(mask.lengths, queries, keys)
        first, end = torch.maximum(first, begins), torch.minimum(end, ends)
    return Sight(*(torch.atleast_2d(x).to(torch.int32).contiguous() for x in torch.broadcast_tensors(first, end)))


def _by_index(mask: Mask, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    own, window = torch.arange(keys - queries, keys, device=device), mask.window
    first = torch.zeros_like(own) if window is None else (own - window + 1).clamp(min=0)
    if not mask.causal:
        return first, torch.full_like(own, keys) if window is None else (own + window).clamp(max=keys)
    if mask.groups is None:
        return first, own + 1
    return first, _with_groups(own + 1, mask.groups, pad(mask.groups, (keys - queries, 0), value=-1))


def _placed(mask: Mask, places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    of_queries, of_keys = (positions_in(one, device) for one in (places.queries, places.keys))
    window, keys = places.window, len(of_keys)
    first = torch.zeros_like(of_queries)
    if window is not None:
        first = torch.searchsorted(of_keys, of_queries - window, right=True)
    if mask.causal:
        end = torch.searchsorted(of_keys, of_queries, right=True)
        return first, end if places.groups is None else _with_groups(end, *places.groups)
    if window is None:
        return first, torch.full_like(of_queries, keys)
    return first, torch.searchsorted(of_keys, of_queries + window)


def _with_groups(end: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """The end of the keys that a query sees, with the later keys of its own group: ends [S] -> [B, S].

    The members of a group are consecutive, so its later keys begin at `end`. `of_queries` [B, S], `of_keys` [B, T].
    """
    keys = of_keys.shape[1]
    own = torch.arange(1, keys + 1, device=end.device).expand_as(of_keys)
    continues = pad(of_keys[:, 1:] == of_keys[:, :-1], (0, 1))
    ends = own.masked_fill(continues, keys).flip(1).cummin(dim=1).values.flip(1)  # of the run that contains a key
    end = end.expand_as(of_queries)
    following = end.clamp(max=keys - 1)
    shared = (of_keys.gather(1, following) == of_queries) & (of_queries >= 0) & (end < keys)
    return torch.where(shared, ends.gather(1, following), end)


def _of_segments(lengths: Lengths, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The first key and the end of the keys in the segment of each query: [B, S] each."""
    of_queries, of_keys = (x.cumsum(dim=1) for x in lengths)
    before = keys - queries if lengths[0] is lengths[1] else 0  # the queries are the last of the keys
    own = torch.arange(before, before + queries, device=of_queries.device).expand(len(of_queries), -1).contiguous()
    numbers = torch.searchsorted(of_queries, own, right=True).clamp(max=of_keys.shape[1] - 1)
    ends = of_keys.gather(1, numbers)
    return ends - lengths[1].gather(1, numbers), ends
