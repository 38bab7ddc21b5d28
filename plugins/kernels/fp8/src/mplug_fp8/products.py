"""The products of linear layers in each recipe: the content of the slot `Linear.product`.

The names of shapes are those of `scaled`, which has what all recipes share.
"""

from torch import Tensor

from mplug_fp8.emulation import BLOCK
from mplug_fp8.operators import (
    BLOCKS,
    LINES,
    ROW,
    cast,
    cast_blocks,
    cast_columns,
    cast_scaled,
    largest,
    quantised,
    rows_of,
    transposed,
    turned,
)
from mplug_fp8.recipes import E5M2, GRADIENT, INPUT
from mplug_fp8.scaled import BOTH, COLUMNS, ROWS, Buffers, Numbers, Products, Quantised
from mplug_nn import Boundary, DelayedScaling, GatheredForm, Operand


class Tensorwise(Products):
    """One scale for a tensor, from its own largest absolute value; ranks agree on the largest value before a cast."""

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """The largest absolute values of parts of the weight; or rows [O, I] and inverse [1], to be kept."""
        found = largest(weight)
        return self._rows_and_inverse(weight, found, buffers) if self.keeps_weights else (found,)

    def _rows_and_inverse(self, weight: Tensor, found: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        rows, _, inverse = cast(weight, found, False, self.options.power_of_two, True, False)
        return rows, inverse

    def gathered_form(self) -> GatheredForm | str:
        """Rows with the scale of the largest number of all ranks."""
        return GatheredForm(self._rows_and_inverse, (True, False), lambda rows, _: largest(rows).amax().view(1))

    def weight_rows(self, weight: Operand) -> Numbers:
        """From the copy, or one pass over the weight."""
        if len(weight.casts) > 1:
            return Numbers(*weight.casts)
        rows, _, inverse = cast(weight.values, weight.casts[0], False, self.options.power_of_two, True, False)
        return Numbers(rows, inverse)

    def weight_columns(self, weight: Operand) -> Numbers:
        """The transposed copy, or one pass over the weight."""
        if len(weight.casts) > 1:
            rows, inverse = weight.casts
            return Numbers(transposed(rows), inverse)
        _, columns, inverse = cast(weight.values, weight.casts[0], False, self.options.power_of_two, False, True)
        return Numbers(columns, inverse)

    def measured(self, x: Tensor, boundary: Boundary | None) -> tuple[Tensor, ...]:
        """The largest absolute values of parts of x."""
        found = largest(x)
        return (found if boundary is None else boundary.largest(found),)

    def quantised(
        self, x: Tensor, measured: tuple[Tensor, ...], operand: str, buffers: Buffers, wanted: tuple[str, ...] = BOTH
    ) -> Quantised:
        """Rows and columns in one pass."""
        e5m2, power = self.is_e5m2(operand), self.options.power_of_two
        rows, columns, inverse = cast(rows_of(x), measured[0], e5m2, power, ROWS in wanted, COLUMNS in wanted)
        return Quantised(Numbers(rows, inverse), Numbers(columns, inverse))

    def is_e5m2(self, operand: str) -> bool:
        """Whether the operand's format is E5M2."""
        return operand == GRADIENT and self.options.gradient == E5M2


class Delayed(Tensorwise):
    """One scale for a tensor, from the largest absolute values in the last steps: one pass over the tensor."""

    def measured(self, x: Tensor, boundary: Boundary | None) -> tuple[Tensor, ...]:
        """Nothing: the scale is known."""
        return ()

    def quantised(
        self, x: Tensor, measured: tuple[Tensor, ...], operand: str, buffers: Buffers, wanted: tuple[str, ...] = BOTH
    ) -> Quantised:
        """Rows and columns in one pass, which raises the statistic of the step."""
        scale, statistic, e5m2 = buffers[DelayedScaling.scale_name(operand)], buffers[operand], self.is_e5m2(operand)
        rows, columns, inverse = cast_scaled(
            rows_of(x), scale, statistic, e5m2, operand == GRADIENT, ROWS in wanted, COLUMNS in wanted
        )
        return Quantised(Numbers(rows, inverse), Numbers(columns, inverse))

    def input_columns(self, x: Tensor, measured: tuple[Tensor, ...], buffers: Buffers) -> Numbers:
        """The columns, without a statistic: the step has it from forward."""
        return Numbers(*cast_columns(rows_of(x), buffers[DelayedScaling.scale_name(INPUT)], self.is_e5m2(INPUT)))


class Rowwise(Products):
    """A scale for each row of an operand, and another for each column."""

    line, block = ROW, ROW

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Nothing; or rows [O, I] with inverses [O] and columns [I, O] with inverses [I], to be kept."""
        return quantised(weight, ROW, self.options.power_of_two, True, True) if self.keeps_weights else ()

    def gathered_form(self) -> GatheredForm | str:
        """Rows and columns have different numbers, so both together are as large as the weight."""
        return "the FP8 numbers of its rows and those of its columns have as many bytes as the weight in bf16"

    def weight_rows(self, weight: Operand) -> Numbers:
        """From the copies, or two passes over the weight."""
        found = weight.casts or quantised(weight.values, ROW, self.options.power_of_two, True, False)
        return Numbers(*found[:2])

    def weight_columns(self, weight: Operand) -> Numbers:
        """The same for columns, whose scales differ from those of the rows."""
        found = weight.casts or quantised(weight.values, ROW, self.options.power_of_two, False, True)
        return Numbers(*found[2:])

    def quantised(
        self, x: Tensor, measured: tuple[Tensor, ...], operand: str, buffers: Buffers, wanted: tuple[str, ...] = BOTH
    ) -> Quantised:
        """Rows with inverses [N], columns with inverses [X]; in blocks, those of lines."""
        power, wants_rows, wants_columns = self.options.power_of_two, ROWS in wanted, COLUMNS in wanted
        rows, of_rows, columns, of_columns = quantised(rows_of(x), self.line, power, wants_rows, wants_columns)
        return Quantised(Numbers(rows, of_rows), Numbers(columns, of_columns))


class Blockwise(Rowwise):
    """A scale for 128 consecutive numbers of a row, and for 128 x 128 numbers of a weight."""

    line, block = LINES, BLOCKS
    fast = False

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Nothing; or rows [O, I] with the inverses of their blocks, to be kept."""
        return cast_blocks(weight, True, False)[:2] if self.keeps_weights else ()

    def gathered_form(self) -> GatheredForm | str:
        """Rows and the inverses of their blocks, if no block has rows of two ranks."""
        return GatheredForm(lambda rows, *_: cast_blocks(rows, True, False)[:2], (True, True), rows_multiple=BLOCK)

    def weight_rows(self, weight: Operand) -> Numbers:
        """From the copy, or one pass over the weight."""
        return Numbers(*(weight.casts or cast_blocks(weight.values, True, False)[:2]))

    def weight_columns(self, weight: Operand) -> Numbers:
        """The transposed copy with its inverses in another order, or one pass over the weight."""
        if not weight.casts:
            return Numbers(*cast_blocks(weight.values, False, True)[2:])
        rows, inverses = weight.casts
        return Numbers(transposed(rows), turned(inverses, *rows.shape))
