"""Caches whose tensors keep their addresses and shapes, so that a CUDA graph can replay the step of a token.

B batch, S positions of a call, T rows of a cache. The first call brings all positions of the prompts, whose padding is
in front. Every later call brings one position of each sample. Rows have no padding: position p of a sample, counted
from its first token, is in row p modulo T.
"""

import torch
from torch import Tensor

from mplug_nn.cache import Cache, CacheSize
from mplug_nn.specification import StaticKeys


def static_keys(positions: Tensor, rows: int) -> StaticKeys:
    """What cores need to know about caches of T rows whose newest rows are those of `positions` [B]."""
    newest = positions[:, None]  # [B, 1]
    distances = -(newest - torch.arange(rows, device=newest.device)).remainder(rows)  # 0 to 1 - T
    distances = distances.masked_fill(newest + distances < 0, 1)
    samples = torch.arange(len(positions) + 1, dtype=torch.int32, device=newest.device)
    return StaticKeys((positions + 1).clamp(max=rows).to(torch.int32), distances, samples * rows, samples)


class Clock:
    """The positions of a batch, which all its static caches share. `positions` [B] are those of the new tokens."""

    def __init__(self, num_samples: int, device: torch.device | str) -> None:
        self.positions = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self.samples = torch.arange(num_samples, device=device)
        self.padding: Tensor | None = None
        """[B]: padding positions of the prompts, while these are computed; None afterwards, and without padding."""
        self.reads_prompts = True
        self._keys: dict[int, tuple[StaticKeys, Tensor]] = {}

    def start(self, lengths: Tensor, padding: Tensor | None) -> None:
        """Begin new samples: the next call brings prompts of `lengths` [B]."""
        self.positions.copy_(lengths).sub_(1)
        self.padding, self.reads_prompts = padding, True
        self._keys.clear()

    def tick(self) -> None:
        """The next call brings the next position of each sample."""
        self.positions.add_(1)
        self.padding, self.reads_prompts = None, False
        self._keys = {rows: self._new_keys(rows) for rows in self._keys}

    def forget(self) -> None:
        """The caches have other numbers of rows from now on."""
        self._keys.clear()

    def keys(self, rows: int) -> tuple[StaticKeys, Tensor]:
        """(what cores need to know about caches of this many rows, the rows [B] of the new positions).

        All caches of a size share them, so a step computes them once: `tick` does, outside of compiled code.
        """
        if rows not in self._keys:
            self._keys[rows] = self._new_keys(rows)
        return self._keys[rows]

    def _new_keys(self, rows: int) -> tuple[StaticKeys, Tensor]:
        return static_keys(self.positions, rows), self.positions.remainder(rows)

    def cache(self, size: CacheSize, reach: int | None) -> "StaticCache":
        """An empty cache of these samples."""
        return StaticCache(size, reach, self)


class StaticCache(Cache):
    """The rows of one attention in buffers [B, T, ...]; T is `size.positions`, or fewer for a window."""

    def __init__(self, size: CacheSize, reach: int | None, clock: Clock) -> None:
        super().__init__(size, reach)
        self.clock = clock
        self._received: tuple[Tensor, ...] = ()
        """The constants of another cache that this one has."""

    @property
    def rows(self) -> int:
        """T."""
        return self.size.positions if self.reach is None else min(self.reach + 1, self.size.positions)

    def keys(self) -> tuple[StaticKeys, Tensor]:
        """`Clock.keys` of this cache. Called before the first step, it makes `tick` compute them for every step."""
        return self.clock.keys(self.rows)

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Add the rows of new positions; returns those that queries at the new positions may see.

        Prompts see their own rows, each of `rows` [B, S, ...]. A later query sees the buffers (`static_keys`).
        """
        if self.clock.reads_prompts:
            self._take_prompts(rows)
            return rows
        self.static_keys, places = self.keys()
        for buffer, x in zip(self._buffers, rows, strict=True):
            buffer[self.clock.samples, places] = x[:, 0]
        return tuple(self._buffers)

    def document_lengths(self, num_rows: int) -> Tensor | None:
        """The padding of prompts as a document of its own: lengths [B, 2]; None without padding."""
        padding = self.clock.padding
        return None if padding is None else torch.stack((padding, num_rows - padding), dim=1)

    def rewind(self, positions: int) -> None:
        """A static cache has one new position in every call, and forgets none."""
        if positions:
            raise ValueError("a static cache forgets no positions")

    def grow(self, positions: int) -> None:
        """Make room for more positions; the rows move to new buffers. Call it while no row has been overwritten."""
        self.size = CacheSize(positions)
        self.clock.keys(self.rows)  # `tick` computes those of the next positions
        if self._buffers and self.rows > self._buffers[0].shape[1]:
            self._buffers = [_longer(buffer, self.rows) for buffer in self._buffers]

    def replace_sample(self, sample: int, other: "StaticCache") -> None:
        """The rows of the only sample of another cache become those of one sample; both have as many rows."""
        if not self._buffers:
            num_samples = len(self.clock.positions)
            self._buffers = [x.new_zeros(num_samples, *x.shape[1:]) for x in other._buffers]
        for buffer, x in zip(self._buffers, other._buffers, strict=True):
            buffer[sample].copy_(x[0])
        self.take_constants(other)

    def replace_samples(self, samples: Tensor, other: "StaticCache", sources: Tensor) -> None:
        """The rows of samples `sources` [n] of another cache become those of `samples` [n]; both have as many rows."""
        if not self._buffers:
            num_samples = len(self.clock.positions)
            self._buffers = [x.new_zeros(num_samples, *x.shape[1:]) for x in other._buffers]
        for buffer, x in zip(self._buffers, other._buffers, strict=True):
            buffer[samples] = x[sources]
        self.take_constants(other)

    def take_constants(self, other: Cache) -> None:
        """Have the constants of another cache; tensors of this cache keep their addresses."""
        if self._received is other.constants:
            return
        self._received = other.constants
        if not self.constants:
            self.constants = tuple(x.clone() for x in other.constants)
        for own, x in zip(self.constants, other.constants, strict=True):
            own.copy_(x)

    def _take_prompts(self, rows: tuple[Tensor, ...]) -> None:
        """Write the last T positions of each prompt to their rows."""
        self.static_keys = None
        keys, _ = self.clock.keys(self.rows)
        found = self.clock.positions[:, None] + keys.distances  # the position in each row
        found = found if self.clock.padding is None else found + self.clock.padding[:, None]
        found = found.clamp(0, rows[0].shape[1] - 1)  # empty rows get values that are finite
        values = [x[self.clock.samples[:, None], found] for x in rows]
        if not self._buffers:
            self._buffers = values
            return
        for buffer, x in zip(self._buffers, values, strict=True):
            buffer.copy_(x)


def _longer(buffer: Tensor, rows: int) -> Tensor:
    longer = buffer.new_zeros(buffer.shape[0], rows, *buffer.shape[2:])
    longer[:, : buffer.shape[1]] = buffer
    return longer
