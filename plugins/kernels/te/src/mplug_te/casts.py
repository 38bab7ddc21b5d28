"""Quantisation by Transformer Engine, as torch operators.

N rows, I columns, P padded rows, O outputs. A quantised tensor is plain tensors: fp8 numbers as bytes (uint8), and
*inverses*, the factors in fp32 that give the values back. `rows` are the numbers in the order of the tensor [N, I].
`columns` are those of its transpose [I, P], where the padding is zero. Hopper multiplies only operands whose contracted
dimension is contiguous, and the weight's gradient contracts the rows.

A format is the name of a dtype of torch: 'float8_e4m3fn'.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug_nn import fake, operator
from mplug_te.library import library, number_of

ALIGNED, BLOCK = 16, 128
"""Multiples of the contracted dimension of a product: of tensorwise scaled operands, and of operands in blocks."""
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal number of fp32."""

# torch reads an operator's schema from its annotated arguments.


def padded(rows: int, multiple: int = ALIGNED) -> int:
    """The number of rows, rounded up."""
    return -(-rows // multiple) * multiple


def _whole(x: Tensor, multiple: int) -> Tensor:
    """x [N, I], contiguous, with rows of zeros up to a multiple."""
    missing = padded(len(x), multiple) - len(x)
    return pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


def scales_of(largest: Tensor, format_name: str, power_of_two: bool = False) -> Tensor:
    """The factors [...] that map the largest absolute values [...] to the largest number of a format; 1 for zero.

    Eager code, because a compiler may divide less precisely.
    """
    limit = torch.finfo(getattr(torch, format_name)).max
    sound = (largest > 0) & largest.isfinite()
    scale = (torch.full_like(largest, limit) / torch.where(sound, largest, 1.0)).clamp(max=LARGEST_SCALE)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(sound, scale, 1.0)


@operator("mplug_te::scale_of")
def scale_of(largest: Tensor, format_name: str, power_of_two: bool) -> Tensor:
    """`scales_of` of one largest absolute value [1], for traced code."""
    return scales_of(largest, format_name, power_of_two)


@fake("mplug_te::scale_of")
def _(largest: Tensor, format_name: str, power_of_two: bool) -> Tensor:
    return torch.empty_like(largest)


@operator("mplug_te::largest_of")
def largest_of(x: Tensor) -> Tensor:
    """x [...] -> its largest absolute value [1] in fp32."""
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    if x.numel():
        library().tex.compute_amax(x, largest)
    return largest


@fake("mplug_te::largest_of")
def _(x: Tensor) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


@operator("mplug_te::cast")
def cast(
    x: Tensor,
    scale: Optional[Tensor],  # noqa: UP045 (torch reads it)
    format_name: str,
    power_of_two: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [N, I], columns [I, P] (without `columns`: [0]), inverse [1], largest absolute value [1].

    Without a scale [1], the scale comes from the largest absolute value of x, and the last result is zero.
    """
    te, number = library().te, number_of(getattr(torch, format_name))
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    if scale is None:
        named: dict[str, Any] = {"rowwise": True, "columnwise": columns, "force_pow_2_scales": power_of_two}
        quantizer = te.Float8CurrentScalingQuantizer(number, x.device, **named)
    else:
        quantizer = te.Float8Quantizer(scale, largest, number, rowwise=True, columnwise=columns)
    quantizer.internal = True
    found = quantizer.quantize(_whole(x, ALIGNED if columns else 1))
    transposed = found._transpose if columns else x.new_empty(0, dtype=torch.uint8)
    return found._data[: len(x)], transposed, found._scale_inv, largest


@fake("mplug_te::cast")
def _(
    x: Tensor, scale: Any, format_name: str, power_of_two: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, i = x.shape
    rows, inverse = x.new_empty((n, i), dtype=torch.uint8), x.new_empty(1, dtype=torch.float32)
    transposed = x.new_empty((i, padded(n)) if columns else 0, dtype=torch.uint8)
    return rows, transposed, inverse, torch.empty_like(inverse)


@operator("mplug_te::transposed")
def transposed(rows: Tensor) -> Tensor:
    """Bytes [N, I] -> [I, P], padded with zeros."""
    number = number_of(torch.float8_e4m3fn)  # any format: bytes are moved
    columns: Tensor = library().tex.fp8_transpose(_whole(rows, ALIGNED), number, out=None)
    return columns


@fake("mplug_te::transposed")
def _(rows: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[1], padded(rows.shape[0])))


@operator("mplug_te::cast_blocks")
def cast_blocks(
    x: Tensor, square: bool, format_name: str, power_of_two: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [P, I] with their inverses, columns [I, P] with theirs; [0] for those that are not wanted.

    128 consecutive numbers have one scale: the inverses are [I / 128, P] and [P / 128, I]. If `square`, 128 x 128
    numbers have one: the inverses are [P / 128, 4 ceil(I / 512)] and [I / 128, 4 ceil(P / 512)].
    """
    te, number = library().te, number_of(getattr(torch, format_name))
    named: dict[str, Any] = {"rowwise": rows, "columnwise": columns, "force_pow_2_scales": power_of_two}
    quantizer = te.Float8BlockQuantizer(number, block_scaling_dim=2 if square else 1, **named)
    quantizer.internal = True
    found = quantizer.quantize(_whole(x, BLOCK))
    none = [x.new_empty(0, dtype=dtype) for dtype in (torch.uint8, torch.float32)]
    by_row = (found._rowwise_data, found._rowwise_scale_inv) if rows else none
    by_column = (found._columnwise_data, found._columnwise_scale_inv) if columns else [one.clone() for one in none]
    return *by_row, *by_column


@fake("mplug_te::cast_blocks")
def _(
    x: Tensor, square: bool, format_name: str, power_of_two: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p, i = padded(x.shape[0], BLOCK), x.shape[1]
    across, down = i // BLOCK, p // BLOCK
    of_rows = (down, padded(across, 4)) if square else (across, p)
    of_columns = (across, padded(down, 4)) if square else (down, i)
    shapes = ((p, i) if rows else 0, of_rows if rows else 0, (i, p) if columns else 0, of_columns if columns else 0)
    dtypes = (torch.uint8, torch.float32) * 2
    made = [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return made[0], made[1], made[2], made[3]
