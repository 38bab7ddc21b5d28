"""The operators: `emulation` on a CPU, `kernels` and torch's products on a GPU. A compiler does not look into them.

N rows, I inputs, O outputs, P padded rows. Formats are given by whether they are E5M2, because operators take no dtype
on all versions of torch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad
from torch.utils.flop_counter import register_flop_formula

import mplug_fp8.emulation as emulation
from mplug_fp8.emulation import BLOCK, E4M3, E5M2, padded
from mplug_nn import aligned, fake, operator

TENSOR, ROW, LINES, BLOCKS = "tensor", "row", "lines", "blocks"
"""Scalings of an operand: one inverse; one per row; one per 128 numbers of a row; one per 128 x 128 numbers."""
RECIPES = {LINES: ScalingType.BlockWise1x128, BLOCKS: ScalingType.BlockWise128x128}


def _format(e5m2: bool) -> torch.dtype:
    return E5M2 if e5m2 else E4M3


def rows_of(x: Tensor) -> Tensor:
    """[..., I] -> [N, I]."""
    return x.reshape(-1, x.shape[-1])


# Tensorwise.


@operator("mplug_fp8::largest")
def largest(x: Tensor) -> Tensor:
    """x [...] -> the largest absolute values of parts of it, in fp32; NaN and infinity are the largest."""
    if not x.is_cuda:
        return emulation.largest_of(x).view(1)
    import mplug_fp8.launch as launch

    return launch.largest_of(x.contiguous())


@fake("mplug_fp8::largest")
def _(x: Tensor) -> Tensor:
    parts = max(1, min(1024, -(-x.numel() // 8192))) if x.is_cuda else 1
    return x.new_empty(parts, dtype=torch.float32)


@operator("mplug_fp8::cast")
def cast(
    x: Tensor, largest: Tensor, e5m2: bool, power_of_two: bool, wants_rows: bool, wants_columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, I] and the largest absolute values of its parts -> rows [N, I], columns [I, P], inverse [1].

    Rows or columns that are not wanted are empty.
    """
    dtype = _format(e5m2)
    if not x.is_cuda:
        rows, inverse = emulation.cast(x, largest, dtype, power_of_two)
        return *_wanted(rows, wants_rows, wants_columns), inverse
    import mplug_fp8.launch as launch

    rows, columns = _empty(x, dtype, wants_rows, wants_columns)
    inverse = launch.cast(
        x.contiguous(),
        largest,
        None,
        dtype,
        power_of_two,
        True,
        rows if wants_rows else None,
        columns if wants_columns else None,
    )
    return rows, columns, inverse


@fake("mplug_fp8::cast")
def _(x: Tensor, largest: Any, e5m2: bool, power: bool, wants_rows: bool, wants_columns: bool) -> Any:
    return *_empty(x, _format(e5m2), wants_rows, wants_columns), x.new_empty(1, dtype=torch.float32)


@operator("mplug_fp8::cast_scaled", mutates_args=("statistic",))
def cast_scaled(
    x: Tensor,
    scale: Tensor,
    statistic: Tensor,
    e5m2: bool,
    in_backward: bool,
    wants_rows: bool,
    wants_columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, I] with a known scale [1] -> rows [N, I], columns [I, P], inverse [1], in one pass over x.

    `statistic` [] becomes the maximum of itself and the largest absolute value of x: in a backward pass only if
    `in_backward`, because a forward pass inside of it is a recomputation (see `mplug_nn.keep_max`).
    """
    dtype, keeps = _format(e5m2), in_backward or torch._C._current_graph_task_id() == -1
    if not x.is_cuda:
        if keeps:
            statistic.copy_(torch.maximum(statistic, emulation.largest_of(x).to(statistic.dtype)))
        rows = emulation.rounded(x, scale, dtype)
        return *_wanted(rows, wants_rows, wants_columns), torch.ones_like(scale) / scale
    import mplug_fp8.launch as launch

    rows, columns = _empty(x, dtype, wants_rows, wants_columns)
    inverse = launch.cast(
        x.contiguous(),
        scale,
        statistic if keeps else None,
        dtype,
        False,
        False,
        rows if wants_rows else None,
        columns if wants_columns else None,
    )
    return rows, columns, inverse


@fake("mplug_fp8::cast_scaled")
def _(
    x: Tensor, scale: Any, statistic: Any, e5m2: bool, in_backward: bool, wants_rows: bool, wants_columns: bool
) -> Any:
    return *_empty(x, _format(e5m2), wants_rows, wants_columns), x.new_empty(1, dtype=torch.float32)


@operator("mplug_fp8::cast_columns")
def cast_columns(x: Tensor, scale: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    """x [N, I] with a known scale [1] -> columns [I, P], inverse [1], of a tensor whose rows have been cast before."""
    dtype = _format(e5m2)
    if not x.is_cuda:
        rows = emulation.rounded(x, scale, dtype)
        return emulation.transposed(rows), torch.ones_like(scale) / scale
    import mplug_fp8.launch as launch

    _, columns = _empty(x, dtype, False, True)
    return columns, launch.cast(x.contiguous(), scale, None, dtype, False, False, None, columns)


@fake("mplug_fp8::cast_columns")
def _(x: Tensor, scale: Any, e5m2: bool) -> Any:
    return _empty(x, _format(e5m2), False, True)[1], x.new_empty(1, dtype=torch.float32)


def _wanted(rows: Tensor, wants_rows: bool, wants_columns: bool) -> tuple[Tensor, Tensor]:
    columns = emulation.transposed(rows) if wants_columns else rows.new_empty(0)
    return rows if wants_rows else rows.new_empty(0), columns


def _empty(x: Tensor, dtype: torch.dtype, wants_rows: bool, wants_columns: bool) -> tuple[Tensor, Tensor]:
    n, i = x.shape
    rows = x.new_empty((n, i) if wants_rows else (0,), dtype=dtype)
    return rows, x.new_empty((i, padded(n)) if wants_columns else (0,), dtype=dtype)


@operator("mplug_fp8::transposed")
def transposed(rows: Tensor) -> Tensor:
    """fp8 numbers [N, I] -> [I, P], padded with zeros."""
    if not rows.is_cuda:
        return emulation.transposed(rows)
    import mplug_fp8.launch as launch

    columns = rows.new_empty((rows.shape[1], padded(len(rows))))
    launch.transposed(rows.contiguous(), columns)
    return columns


@fake("mplug_fp8::transposed")
def _(rows: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[1], padded(len(rows))))


def turned(inverse: Tensor, outputs: int, inputs: int) -> Tensor:
    """The inverses of the blocks of a weight [O, I] -> those of its transpose; see `cast_blocks`."""
    blocks, lines = outputs // BLOCK, inputs // BLOCK
    return pad(inverse[:, :lines].t(), (0, padded(blocks, 4) - blocks)).contiguous()


# Rowwise and blockwise.


@operator("mplug_fp8::cast_rowwise")
def cast_rowwise(
    x: Tensor, power_of_two: bool, wants_rows: bool, wants_columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [W, N, I] -> rows [W, N, I] with inverses [W, N], columns [W, I, P] with inverses [W, I].

    Rows or columns that are not wanted are empty. So are their inverses.
    """
    if not x.is_cuda:
        return _only_wanted(emulation.cast_rowwise(x, power_of_two), wants_rows, wants_columns)
    import mplug_fp8.launch as launch

    return _only_wanted(launch.cast_rowwise(x.contiguous(), power_of_two), wants_rows, wants_columns)


@fake("mplug_fp8::cast_rowwise")
def _(x: Tensor, power_of_two: bool, wants_rows: bool, wants_columns: bool) -> Any:
    w, n, i = x.shape
    numbers = x.new_empty((w, n, i), dtype=E4M3), x.new_empty((w, i, padded(n)), dtype=E4M3)
    inverses = x.new_empty((w, n), dtype=torch.float32), x.new_empty((w, i), dtype=torch.float32)
    return _only_wanted((numbers[0], inverses[0], numbers[1], inverses[1]), wants_rows, wants_columns)


@operator("mplug_fp8::cast_lines")
def cast_lines(x: Tensor, wants_rows: bool, wants_columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [P, I] with inverses [I / 128, P], columns [I, P] with inverses [P / 128, I].

    Rows or columns that are not wanted are empty. So are their inverses.
    """
    if not x.is_cuda:
        return _only_wanted(emulation.cast_lines(x), wants_rows, wants_columns)
    import mplug_fp8.launch as launch

    return _only_wanted(launch.cast_lines(x.contiguous()), wants_rows, wants_columns)


@fake("mplug_fp8::cast_lines")
def _(x: Tensor, wants_rows: bool, wants_columns: bool) -> Any:
    n, i = x.shape
    p = padded(n, BLOCK)
    numbers = x.new_empty((p, i), dtype=E4M3), x.new_empty((i, p), dtype=E4M3)
    inverses = [x.new_empty(shape, dtype=torch.float32) for shape in ((i // BLOCK, p), (p // BLOCK, i))]
    return _only_wanted((numbers[0], inverses[0], numbers[1], inverses[1]), wants_rows, wants_columns)


def _only_wanted(
    found: tuple[Tensor, Tensor, Tensor, Tensor], wants_rows: bool, wants_columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows, inverses, columns, inverses; the kernels compute all of them, and unwanted ones are freed."""
    wanted = (wants_rows, wants_rows, wants_columns, wants_columns)
    rows, of_rows, columns, of_columns = (
        x if wants else x.new_empty(0) for x, wants in zip(found, wanted, strict=True)
    )
    return rows, of_rows, columns, of_columns


@operator("mplug_fp8::cast_blocks")
def cast_blocks(weight: Tensor, wants_rows: bool, wants_columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [O, I] -> rows [O, I] with inverses [O / 128, 4 ceil(I / 512)], columns [I, O] with theirs.

    Rows or columns that are not wanted are empty. So are their inverses.
    """
    if not weight.is_cuda:
        return _only_wanted(emulation.cast_blocks(weight), wants_rows, wants_columns)
    import mplug_fp8.launch as launch

    return _only_wanted(launch.cast_blocks(weight.contiguous()), wants_rows, wants_columns)


@fake("mplug_fp8::cast_blocks")
def _(weight: Tensor, wants_rows: bool, wants_columns: bool) -> Any:
    o, i = weight.shape
    numbers = weight.new_empty((o, i), dtype=E4M3), weight.new_empty((i, o), dtype=E4M3)
    shapes = ((o // BLOCK, padded(i // BLOCK, 4)), (i // BLOCK, padded(o // BLOCK, 4)))
    inverses = [weight.new_empty(shape, dtype=torch.float32) for shape in shapes]
    return _only_wanted((numbers[0], inverses[0], numbers[1], inverses[1]), wants_rows, wants_columns)


# Products.


@operator("mplug_fp8::multiply")
def multiply(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, scaling: str, other_scaling: str, fast: bool
) -> Tensor:
    """a [M, K] times b [N, K] transposed -> bf16 [M, N]. `fast` sums in the tensor cores' own, narrower format."""
    y = a.new_empty((len(a), len(b)), dtype=torch.bfloat16)
    return multiply_into(y, a, b, a_inverse, b_inverse, (scaling, other_scaling), fast)


@fake("mplug_fp8::multiply")
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty((len(a), len(b)), dtype=torch.bfloat16)


@operator("mplug_fp8::add_multiplied", mutates_args=("total", "stale"))
def add_multiplied(
    total: Tensor, stale: Tensor, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, scaling: str
) -> None:
    """total [M, N] += a [M, K] times b [N, K] transposed; the product overwrites a total that is `stale`.

    torch has no fp8 product that adds to its result. So the second and later micro batches of a step make the product
    in the dtype of the total, and add it.
    """
    if not a.is_cuda:
        product = emulation.multiply(a, b, a_inverse, b_inverse)
    else:
        place = aligned(total) if stale else torch.empty_like(total)
        product = multiply_into(place, a, b, a_inverse, b_inverse, (scaling, scaling), False)
    if not stale:
        total.add_(product)
    elif product is not total:
        total.copy_(product)
    stale.fill_(False)


def multiply_into(
    y: Tensor, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, scalings: tuple[str, str], fast: bool
) -> Tensor:
    """y [M, N] = a [M, K] times b [N, K] transposed, in the dtype of y, whose rows are contiguous; it returns y."""
    if not a.is_cuda:
        return y.copy_(emulation.multiply(a, b, a_inverse, b_inverse))
    if scalings[0] in (TENSOR, ROW):
        rowwise = scalings[0] == ROW
        inverses = (a_inverse[:, None], b_inverse[None, :]) if rowwise else (a_inverse, b_inverse)
        torch._scaled_mm(a, b.t(), *inverses, out_dtype=y.dtype, use_fast_accum=fast, out=y)
    else:
        given = [
            ([inverse.t()], [RECIPES[scaling].value], [SwizzleType.NO_SWIZZLE.value])
            for inverse, scaling in zip((a_inverse, b_inverse), scalings, strict=True)
        ]
        torch.ops.aten._scaled_mm_v2.out(a, b.t(), *given[0], *given[1], None, y.dtype, [], False, out=y)
    return y


@register_flop_formula(torch.ops.mplug_fp8.multiply)
def _flops(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


@register_flop_formula(torch.ops.mplug_fp8.add_multiplied)
def _flops_of_sum(total: Any, stale: Any, a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


def quantised(
    x: Tensor, scaling: str, power_of_two: bool, wants_rows: bool, wants_columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, K] -> rows, their inverses, columns, their inverses, where rows (`ROW`) or lines (`LINES`) have scales."""
    if scaling == LINES:
        return cast_lines(x, wants_rows, wants_columns)
    rows, row_inverses, columns, column_inverses = cast_rowwise(x[None], power_of_two, wants_rows, wants_columns)
    return (*_single(rows, row_inverses, wants_rows), *_single(columns, column_inverses, wants_columns))


def _single(numbers: Tensor, inverses: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    return (numbers[0], inverses[0]) if wanted else (numbers, inverses)
