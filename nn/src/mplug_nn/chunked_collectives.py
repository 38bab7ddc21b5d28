"""The collectives around a product in chunks, so that they overlap with the product.

A strategy makes `ChunkedCollectives`, and states their name in a `Boundary`. A product that overlaps passes this name
to an operator of its own (`mplug.tensors.operator`); the operator finds them with `collectives_named` and computes
chunk by chunk. R ranks; [..., n, X] are a rank's rows, [..., R n, X] those of all.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Some rows of a tensor [..., N, X]: these samples of the flattened leading dimensions, and these positions."""

    samples: slice
    positions: slice

    def of(self, x: Tensor) -> Tensor:
        """The rows of x [..., N, X] as a view [b, m, X]."""
        return flattened(x)[self.samples, self.positions]


def flattened(x: Tensor) -> Tensor:
    """x [..., N, X] as a view [B, N, X]; x must be contiguous, or have three dimensions."""
    return x if x.dim() == 3 else x.view(-1, *x.shape[-2:])


Produce = Callable[[Rows, Tensor, bool], None]
"""(rows, out [b, m, X], add): write the product of these rows to `out`; if `add` is true, add it to `out`."""


class Arrival:
    """Tensors that arrive from all ranks: the result of `ChunkedCollectives.gathering`, a context manager.

    Its tensors are valid until the `with` block ends.
    """

    def __enter__(self) -> "Arrival":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """All rows in chunks as they arrive, rows of this rank first: (their place in the whole, tensors [b, m, X])."""
        raise NotImplementedError

    def whole(self) -> tuple[Tensor, ...]:
        """All ranks' rows [..., R n, X] of each tensor; only if `gathering` was called with `keep`."""
        raise NotImplementedError

    def kept(self) -> tuple[Tensor, ...]:
        """`whole`, in memory that stays valid after the `with` block."""
        return tuple(x.clone() for x in self.whole())

    def end(self) -> None:
        """Release the memory of the arrived tensors."""


class ChunkedCollectives:
    """The collectives of a `Boundary` in chunks. The methods run eagerly, on the current stream, inside operators.

    All ranks of the boundary call the same methods in the same order with the same shapes. The order of every sum is
    fixed, so results are deterministic. No method makes the CPU wait for the device, except when memory must grow.
    """

    num_parts: int
    """R if the strategy splits the activations, so that a whole tensor has R times the rows of a part; else 1."""

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start to gather tensors [..., n, X] of any dtypes that have the same rows.

        `keep` states whether `whole` or `kept` will be called. The parts must not change before the `with` block ends.
        """
        raise NotImplementedError

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's part [..., n, X] of the sum over the ranks of a product of the shape `partial` [..., R n, X].

        `produce` computes rows of this rank's product, each sent while the next are computed. `fill` is called when all
        that other ranks need is computed, for work that hides the last transfer. The result has the dtype and device of
        `like`.
        """
        raise NotImplementedError


COLLECTIVES: dict[str, ChunkedCollectives] = {}
"""The chunked collectives of this process by name."""


def name_collectives(name: str, chunked: ChunkedCollectives) -> None:
    """Make chunked collectives known by a name, in this process; others of the same name are replaced."""
    COLLECTIVES[name] = chunked


def collectives_named(name: str) -> ChunkedCollectives:
    """The chunked collectives with a name (`Boundary.chunked`)."""
    return COLLECTIVES[name]
