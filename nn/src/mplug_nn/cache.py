"""What an attention keeps of earlier positions when a model samples: rows of keys and values, or of another vector.

B samples, S new positions, T rows that the queries of a call may see. A sample that is shorter than the longest one of
its batch begins with padding positions, so that the last positions of all samples are aligned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mplug_nn.specification import StaticKeys


@dataclass(frozen=True)
class CacheSize:
    """The positions that a batch needs in a cache.

    `positions` is the number of positions of a sample, with its padding. A call may compute the last `again` positions
    of the previous call once more (`Cache.rewind`). `padding` [B] is the number of padding positions of each sample,
    and `most_padding` their maximum; None and 0: no sample has padding. `make` makes another kind of cache, of this
    size and with a reach, and `make_state` another cache of a state; None: a `Cache`, and a `StateCache`.
    """

    positions: int
    again: int = 0
    padding: Tensor | None = None
    most_padding: int = 0
    make: "Callable[[CacheSize, int | None], Cache] | None" = None
    make_state: "Callable[[CacheSize], Any] | None" = None

    def cache(self, reach: int | None = None) -> "Cache":
        """An empty cache of this size; `reach` as in `Cache`."""
        return Cache(self, reach) if self.make is None else self.make(self, reach)


class Cache:
    """The rows of one attention, in the order of their positions.

    `reach` is the number of positions before a query that the query sees: a window of W positions has the reach W - 1.
    None: all of them. The cache keeps no rows that no later query sees.

    `constants` are tensors that a module computes once and keeps while the model samples.
    """

    static_keys: StaticKeys | None = None
    """What the core needs to know about the rows of the last `extend`, if they are those of a static cache."""
    constants: tuple[Tensor, ...] = ()

    def __init__(self, size: CacheSize, reach: int | None = None) -> None:
        self.size, self.reach = size, reach
        self.kept = size.positions if reach is None else reach + size.again
        """Rows of earlier positions that must remain when new rows arrive."""
        self.length = 0
        """Positions so far, with padding."""
        self._end = 0
        """Rows in the buffers."""
        self._buffers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows and constants that are allocated so far."""
        return sum(x.nbytes for x in (*self._buffers, *self.constants))

    def rewind(self, positions: int) -> None:
        """Forget the last positions; the next call brings them again."""
        if positions > self.size.again:
            raise ValueError(f"a cache with again={self.size.again} cannot forget {positions} positions")
        self.length -= positions
        self._end -= positions

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Add the rows of new positions; returns those that queries at the new positions may see.

        Each of `rows` is [B, S, ...] -> [B, T, ...], with the new rows at the end. The results are views of the
        buffers, valid until the next call.
        """
        new = rows[0].shape[1]
        if self.length + new > self.size.positions:
            raise ValueError(f"a cache for {self.size.positions} positions cannot hold {self.length + new}")
        if not self._buffers:
            room = min(self.size.positions, self.kept + max(self.kept, self.size.again + 1))
            self._buffers = [x.new_empty(x.shape[0], room, *x.shape[2:]) for x in rows]
        self.length += new
        if self._end + new > self._buffers[0].shape[1]:
            self._end = self._shift(min(self.kept, self._end))
        if self._end + new > self._buffers[0].shape[1]:
            return self._longer_than_buffers(rows)
        for buffer, x in zip(self._buffers, rows, strict=True):
            buffer[:, self._end : self._end + new] = x
        self._end += new
        begin = 0 if self.reach is None else max(0, self._end - new - self.reach)
        return tuple(buffer[:, begin : self._end] for buffer in self._buffers)

    def document_lengths(self, num_rows: int) -> Tensor | None:
        """The padding as a document of its own: lengths [B, 2] of the last `num_rows` positions; None without padding.

        So no position of a sample sees padding.
        """
        before = self.length - num_rows
        if self.size.padding is None or before >= self.size.most_padding:
            return None
        padding = (self.size.padding - before).clamp(min=0)
        return torch.stack((padding, num_rows - padding), dim=1)

    def _shift(self, kept: int) -> int:
        """Move the last `kept` rows to the front of the buffers; returns their number."""
        for buffer in self._buffers:
            buffer[:, :kept] = buffer[:, self._end - kept : self._end].clone()
        return kept

    def _longer_than_buffers(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A prompt that is longer than a window: its last rows remain."""
        joined = tuple(
            torch.cat((buffer[:, : self._end], x), dim=1) for buffer, x in zip(self._buffers, rows, strict=True)
        )
        self._end = min(self.kept, joined[0].shape[1])
        for buffer, x in zip(self._buffers, joined, strict=True):
            buffer[:, : self._end] = x[:, x.shape[1] - self._end :]
        return joined
