"""Sets of ranks that follow from mesh axes. Nothing here lists ranks before a caller iterates over them."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from operator import index
from typing import SupportsIndex, overload


@dataclass(frozen=True)
class Ranks(Sequence[int]):
    """Ranks in ascending order: `first` plus one number from each of `offsets`.

    Each of `offsets` begins with 0; a step of it is larger than the sum of all that follow. `Ranks.of` makes the one
    canonical form of a set, so equal sets compare equal, also if they come from different views of a mesh.
    """

    first: int
    offsets: tuple[Sequence[int], ...] = ()

    @classmethod
    def of(cls, first: int, offsets: Iterable[Sequence[int]]) -> "Ranks":
        """The canonical form: equal steps are a range, and two ranges are one if the inner fills the outer's step."""
        found: list[Sequence[int]] = []
        for inner in (_as_range(one) for one in offsets if len(one) > 1):
            outer = found[-1] if found else None
            if isinstance(outer, range) and isinstance(inner, range) and outer.step == inner.step * len(inner):
                found[-1] = range(0, len(outer) * outer.step, inner.step)
            else:
                found.append(inner)
        return cls(first, tuple(found))

    def __len__(self) -> int:
        return prod(map(len, self.offsets))

    def __iter__(self) -> Iterator[int]:
        return (self.first + sum(chosen) for chosen in product(*self.offsets))

    @overload
    def __getitem__(self, number: int) -> int: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[int, ...]: ...

    def __getitem__(self, number: int | slice) -> int | tuple[int, ...]:
        if isinstance(number, slice):
            return tuple(self)[number]
        rest, found = range(len(self))[number], self.first
        for offsets in reversed(self.offsets):
            rest, place = divmod(rest, len(offsets))
            found += offsets[place]
        return found

    def __contains__(self, rank: object) -> bool:
        rest = index(rank) - self.first if isinstance(rank, SupportsIndex) else -1
        if rest < 0:
            return False
        for offsets in self.offsets:
            rest -= offsets[bisect(offsets, rest) - 1]
        return rest == 0


def _as_range(offsets: Sequence[int]) -> Sequence[int]:
    """A range, if the offsets have equal steps."""
    regular = range(0, offsets[1] * len(offsets), offsets[1])
    return offsets if isinstance(offsets, range) or tuple(regular) != offsets else regular


@dataclass(frozen=True)
class Grouping:
    """A partition of ranks into groups, in which ranks differ only along some axes of one view.

    `axes` and `sizes` are the view's, the slowest-varying first. `together` says, for each axis, which indices a group
    spans. A number n stands for blocks of n consecutive indices: with 1, the ranks of a group have the same index; with
    the axis' size, they have all indices. A tuple stands for these indices only (tied embeddings are on the first and
    the last stage); a rank at another index is alone.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    together: tuple[int | tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return prod(one if isinstance(one, int) else len(one) for one in self.together)

    @cached_property
    def leader(self) -> Ranks:
        """The first group: groupings with the same first group are the same."""
        firsts = (0 if isinstance(one, int) else one[0] for one in self.together)
        return self.of(sum(first * step for first, step in zip(firsts, self._steps, strict=True)))

    def of(self, rank: int) -> Ranks:
        """The group of a rank."""
        first, offsets = rank, list[Sequence[int]]()
        for size, together, step in zip(self.sizes, self.together, self._steps, strict=True):
            index = rank // step % size
            if isinstance(together, int):
                first -= index % together * step
                offsets.append(range(0, together * step, step))
            elif index in together:
                first -= (index - together[0]) * step
                offsets.append(tuple((other - together[0]) * step for other in together))
            else:
                return Ranks(rank)
        return Ranks.of(first, offsets)

    def all(self) -> Iterator[Ranks]:
        """Every group; their number grows with the number of ranks."""
        starts = (
            range(0, size * step, one * step) if isinstance(one, int) else (one[0] * step,)
            for size, one, step in zip(self.sizes, self.together, self._steps, strict=True)
        )
        return (self.of(sum(chosen)) for chosen in product(*starts))

    def without(self, axes: Iterable[str]) -> "Grouping":
        """The groups within these groups in which ranks have the same index along `axes`."""
        fixed = set(axes)
        together = (1 if axis in fixed else one for axis, one in zip(self.axes, self.together, strict=True))
        return Grouping(self.axes, self.sizes, tuple(together))

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """By how much the rank grows from one index of an axis to the next."""
        return tuple(prod(self.sizes[number + 1 :]) for number in range(len(self.sizes)))
