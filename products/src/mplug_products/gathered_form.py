"""How ranks that each store some rows of a weight gather the copies that a product reads, instead of the weight.

O rows in all, o rows of a rank, I inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GatheredForm:
    """How a product's copies of a weight [O, I] are made from the rows that each rank stores.

    A strategy that shards rows (FSDP) calls `measured` and `cast` on every rank with that rank's rows [o, I], in the
    precision of the weights. All ranks have equally many rows: those beyond the end of the weight are zero. The
    strategy gathers the copies along dimension 0, and drops the padding. The product receives them as `weight.casts`,
    and must compute bitwise the same from them as from the whole weight. Its `weight.values` then have the shape and
    the dtype of the weight, and are all NaN.

    - `cast(rows [o, I], largest [k], buffers) -> copies`. Dimension 0 of a copy has the rows, or a fixed part of their
      number: one number for 128 rows, for example.
    - `along_rows` says for each copy whether ranks gather it. The others depend on `largest` alone, so every rank has
      them: the scale of the whole weight, for example. They do not travel.
    - `measured(rows [o, I], buffers) -> [k]`, of at least fp32: their elementwise maximum over all ranks is `largest`.
      NaN is the largest number. None: `cast` needs no maximum, and `largest` is empty.
    - `rows_multiple`: `cast` is exact only if every rank's rows begin at a multiple of it. With other borders the
      weight itself is gathered.

    `buffers` are those that the product receives; only states may be read. The host finds out the shapes of copies with
    tensors without memory, so operators need a `fake`.
    """

    cast: Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, ...]]
    along_rows: tuple[bool, ...]
    measured: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None
    rows_multiple: int = 1

    def largest(self, rows: Tensor, buffers: Mapping[str, Tensor]) -> Tensor:
        """The values [k] of a rank's rows whose maximum over the ranks `cast` needs; empty if it needs none."""
        return rows.new_empty(0) if self.measured is None else self.measured(rows, buffers)


NO_GATHERED_FORM = "its product does not say how copies are made from rows of the weight (gathered_form)"
