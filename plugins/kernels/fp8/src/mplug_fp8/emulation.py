"""The definition of every operation in plain torch. On a CPU it computes; on a GPU kernels must give the same bits.

N rows, I columns, P rows padded to a multiple of `ROWS` (`BLOCK` in blocks), O outputs.

A quantised tensor is fp8 numbers and *inverses*: the factors, in fp32, that give the values back. `rows` are the fp8
numbers in the order of the tensor [N, I]. `columns` are those of its transpose [I, P], where the padding is zero:
Hopper multiplies only operands whose contracted dimension is contiguous, and the weight's gradient contracts the rows.
"""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 16
"""The contracted dimension of an fp8 product must be a multiple of it."""
BLOCK = 128
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal number of fp32, so no inverse is subnormal."""


def padded(rows: int, multiple: int = ROWS) -> int:
    """The number of rows, rounded up."""
    return -(-rows // multiple) * multiple


def limit(dtype: torch.dtype) -> float:
    """The largest number of a format: 448 or 57344."""
    return float(torch.finfo(dtype).max)


def scales_of(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(the factors that map the largest absolute values [...] to the largest number of the format, their inverses).

    The scale of zero is 1. That of infinity and of NaN is NaN, so the product is not finite, and the host skips the
    step.
    """
    largest = largest.float()
    scale = torch.where(largest > 0, torch.full_like(largest, limit(dtype)) / largest, torch.ones_like(largest))
    scale = scale.clamp(max=LARGEST_SCALE)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    return scale, torch.ones_like(scale) / scale


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in fp8, to the nearest, ties to even. Finite values saturate; infinity and NaN become NaN."""
    end = limit(dtype)
    sound = (x.abs() < torch.inf) & ~scale.isnan()
    return torch.where(sound, (x.float() * scale).clamp(-end, end), torch.nan).to(dtype)


def transposed(rows: Tensor, multiple: int = ROWS) -> Tensor:
    """fp8 numbers [N, I] -> [I, P], contiguous, padded with zeros."""
    columns = torch.zeros(rows.shape[1], padded(len(rows), multiple), dtype=torch.uint8, device=rows.device)
    columns[:, : len(rows)] = rows.view(torch.uint8).t()
    return columns.view(rows.dtype)


def largest_of(x: Tensor) -> Tensor:
    """The largest absolute value [] in fp32, NaN if there is one; 0 if there are no values."""
    return x.float().abs().amax() if x.numel() else x.new_zeros((), dtype=torch.float32)


# Tensorwise.


def cast(x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """x [N, I] and the largest absolute values of its parts [...] -> rows, inverse [1]."""
    scale, inverse = scales_of(largest.amax().view(1), dtype, power_of_two)
    return rounded(x, scale, dtype), inverse


# Rowwise: each row of an operand has a scale. W matrices may be quantised at once.


def cast_rowwise(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [W, N, I] -> rows [W, N, I] with inverses [W, N], columns [W, I, P] with inverses [W, I]."""
    w, n, i = x.shape
    found = []
    for dim in (2, 1):
        largest = x.float().abs().amax(dim=dim) if n else x.new_zeros((w, n if dim == 2 else i), dtype=torch.float32)
        scale, inverse = scales_of(largest, E4M3, power_of_two)
        found += [rounded(x, scale.unsqueeze(dim), E4M3), inverse]
    rows, row_inverses, columns, column_inverses = found
    return rows, row_inverses, torch.stack([transposed(matrix) for matrix in columns]), column_inverses


# Blockwise: 128 consecutive numbers of a row, or blocks of 128 x 128 numbers of a weight, have a scale.


def cast_lines(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [P, I] with inverses [I / 128, P], columns [I, P] with inverses [P / 128, I].

    The inverses are in the order in which the product reads them.
    """
    whole = torch.cat((x, x.new_zeros(padded(len(x), BLOCK) - len(x), x.shape[1])))
    p, i = whole.shape
    rows, row_inverses = _cast_lines(whole)
    columns, column_inverses = _cast_lines(whole.t())
    return rows.view(p, i), row_inverses, columns.view(i, p), column_inverses


def _cast_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(1, (-1, BLOCK))
    scale, inverse = scales_of(blocks.float().abs().amax(dim=2), E4M3, power_of_two=True)  # [N, I / 128]
    return rounded(blocks, scale[..., None], E4M3).flatten(1).contiguous(), inverse.t().clone(
        memory_format=torch.contiguous_format
    )


def cast_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [O, I] -> rows [O, I] with inverses [O / 128, 4 ceil(I / 512)], columns [I, O] with theirs.

    The product reads lines of inverses of a multiple of 16 bytes; the padding is zero.
    """
    o, i = weight.shape
    blocks = weight.view(o // BLOCK, BLOCK, i // BLOCK, BLOCK)
    scale, inverse = scales_of(blocks.float().abs().amax(dim=(1, 3)), E4M3, power_of_two=True)
    rows = rounded(blocks, scale[:, None, :, None], E4M3).view(o, i)
    return rows, _lines(inverse), transposed(rows), _lines(inverse.t())


def _lines(inverse: Tensor) -> Tensor:
    lines = inverse.new_zeros(inverse.shape[0], padded(inverse.shape[1], 4))
    lines[:, : inverse.shape[1]] = inverse
    return lines


# Products.


def multiply(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor) -> Tensor:
    """a [M, K] times b [N, K] transposed, in fp32, from the values that the quantised operands stand for.

    The shapes of the inverses say how they apply: [1], [M] and [N], [K / 128, M] and [K / 128, N], or [N / 128, ...].
    """
    wide_a, wide_b = a.float(), b.float()
    if a_inverse.dim() == 1:
        whole = a_inverse[:, None] * b_inverse[None, :]
        y: Tensor = wide_a @ wide_b.t()
        return y * whole
    values_a = _of_lines(wide_a, a_inverse)
    if b_inverse.shape == (a.shape[1] // BLOCK, len(b)):
        return values_a @ _of_lines(wide_b, b_inverse).t()
    inverse = b_inverse[:, : b.shape[1] // BLOCK].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values_a @ (wide_b * inverse).t()


def _of_lines(x: Tensor, inverse: Tensor) -> Tensor:
    return (x.unflatten(1, (-1, BLOCK)) * inverse.t()[..., None]).flatten(1)


# Products of groups of rows with one matrix each, rowwise. e groups, Q padded rows of all groups.

GROUP = 32
"""Columns of a group begin at a multiple of it: the contracted dimension of a group must be a multiple of ROWS."""


def columns_of_groups(rows: int, groups: int) -> int:
    """Enough padded rows for any groups of so many rows in all."""
    return padded(rows, GROUP) + GROUP * groups


def spans(ends: Tensor) -> list[tuple[int, int]]:
    """Where each group begins and ends, as Python integers."""
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def cast_grouped(x: Tensor, ends: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, I], ends [e] -> rows [M, I] with inverses [M], columns [I, Q] with inverses [e, I], ends of columns [e].

    A column has a scale for each group. Rows after the last group are zero.
    """
    (m, i), e = x.shape, len(ends)
    rows, columns = x.new_zeros((m, i), dtype=E4M3), x.new_zeros((i, columns_of_groups(m, e)), dtype=E4M3)
    row_inverses, column_inverses = (x.new_ones(shape, dtype=torch.float32) for shape in ((m,), (e, i)))
    begin, column_ends = 0, []
    for group, (start, stop) in enumerate(spans(ends)):
        found = cast_rowwise(x[start:stop][None], power_of_two)
        rows[start:stop], row_inverses[start:stop] = found[0][0], found[1][0]
        columns[:, begin : begin + found[2].shape[2]], column_inverses[group] = found[2][0], found[3][0]
        begin += padded(stop - start, GROUP)
        column_ends.append(begin)
    return rows, row_inverses, columns, column_inverses, ends.new_tensor(column_ends)


def multiply_grouped(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, ends: Tensor) -> Tensor:
    """a [M, K] times the matrix of each row's group, b [e, N, K] transposed -> fp32 [M, N]; zero after the groups."""
    y = a.new_zeros((len(a), b.shape[1]), dtype=torch.float32)
    for group, (start, stop) in enumerate(spans(ends)):
        y[start:stop] = multiply(a[start:stop], b[group], a_inverse[start:stop], b_inverse[group])
    return y


def multiply_columns(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, ends: Tensor) -> Tensor:
    """Columns a [O, Q] times columns b [I, Q] transposed, for each group -> fp32 [e, O, I]."""
    products = [
        multiply(a[:, start:stop], b[:, start:stop], a_inverse[group], b_inverse[group])
        for group, (start, stop) in enumerate(spans(ends))
    ]
    return torch.stack(products)
