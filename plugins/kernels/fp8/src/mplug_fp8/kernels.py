"""The Triton kernels that quantise. Their results are bit-equal to `emulation`, which defines them.

N rows, I columns, P padded rows. A program processes a tile [TILE_N, TILE_I]. It reads the tile once, and writes the
fp8 numbers in the order of the tensor [N, I], transposed [I, P], or both. Triton transposes a tile in shared memory, so
that every access to global memory is coalesced. The largest absolute value is a maximum of integers: the bits of
absolute values have the order of the values, and those of NaN are above those of infinity.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl

LARGEST_SCALE: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def _bits(x):
    """The bits of the absolute values of a tile, as integers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits, E5M2: tl.constexpr, POWER: tl.constexpr):
    """(scales, inverses) of the largest absolute values with these bits."""
    largest = bits.to(tl.float32, bitcast=True)
    limit = tl.full(largest.shape, 57344.0 if E5M2 else 448.0, tl.float32)
    one = tl.full(largest.shape, 1.0, tl.float32)
    positive = largest > 0
    scale = tl.where(positive, tl.div_rn(limit, tl.where(positive, largest, 1.0)), 1.0)
    scale = tl.minimum(scale, LARGEST_SCALE)
    if POWER:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    return scale, tl.div_rn(one, scale)


@triton.jit
def _numbers(x, scale, E5M2: tl.constexpr):
    """The bytes of x * scale in fp8. The conversion saturates, also infinity; NaN remains."""
    numbers = (x * scale).to(tl.float8e5 if E5M2 else tl.float8e4nv)
    return numbers.to(tl.uint8, bitcast=True)


@triton.jit
def _tile(num_lines, TILE_N: tl.constexpr, TILE_I: tl.constexpr):
    """The (rows [TILE_N], columns [TILE_I]) of this program's tile; neighbouring programs share rows."""
    row = (tl.program_id(0) // num_lines).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    column = (tl.program_id(0) % num_lines) * TILE_I + tl.arange(0, TILE_I)
    return row, column


@triton.jit
def fp8_largest(x, partial, count, BLOCK: tl.constexpr):
    """partial [programs]: the largest absolute value of each program's share of x [count]."""
    largest = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _bits(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.store(partial + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def fp8_cast(
    x,
    rows,
    columns,
    scale_source,
    inverse,
    statistic,
    num_rows,
    padded_rows,
    num_parts,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    E5M2: tl.constexpr,
    POWER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """One scale for x [N, I]; the first program writes its inverse [1].

    With PARTS, `scale_source` are the bits of the largest absolute values of parts of x. Without, it is the scale
    itself, and KEEP raises `statistic` to the bits of the largest absolute value.
    """
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    inside = (r < num_rows) & (c < I)
    value = tl.load(x + r * I + c, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        part = tl.arange(0, PARTS)
        bits = tl.load(scale_source + part, mask=part < num_parts, other=0)
        scale, own_inverse = _scale(tl.max(bits, axis=0), E5M2, POWER)
    else:
        scale = tl.load(scale_source)
        own_inverse = tl.div_rn(1.0, scale)
        if KEEP:
            largest = tl.max(tl.max(_bits(value), axis=1), axis=0)
            tl.atomic_max(statistic, largest, mask=largest > tl.load(statistic, volatile=True), sem="relaxed")
        value += value * 0.0  # infinity becomes NaN
    if tl.program_id(0) == 0:
        tl.store(inverse, own_inverse)
    numbers = _numbers(value, scale, E5M2)
    if ROWS:
        tl.store(rows + r * I + c, numbers, mask=inside)
    if COLUMNS:
        if ROWS:
            # Without this reading, the compiler transposes x in bf16 and converts it twice: half the speed.
            tl.debug_barrier()
            numbers = tl.load(rows + r * I + c, mask=inside, other=0)
        at = columns + column[:, None].to(tl.int64) * padded_rows + row[None, :]
        tl.store(at, tl.trans(numbers), mask=(column[:, None] < I) & (row[None, :] < padded_rows))


@triton.jit
def fp8_transpose(
    rows,
    columns,
    num_rows,
    padded_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """columns [I, P] = the transposed bytes of rows [N, I], padded with zeros."""
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    numbers = tl.load(rows + r * I + c, mask=(r < num_rows) & (c < I), other=0)
    at = columns + column[:, None].to(tl.int64) * padded_rows + row[None, :]
    tl.store(at, tl.trans(numbers), mask=(column[:, None] < I) & (row[None, :] < padded_rows))


@triton.jit
def fp8_largest_rowwise(
    x,
    row_bits,
    column_bits,
    num_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """Raise row_bits [W, N] and column_bits [W, I] to those of x [W, N, I]; the second program axis counts W."""
    matrix = tl.program_id(1).to(tl.int64)
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    x += matrix * num_rows * I
    bits = _bits(tl.load(x + r * I + c, mask=(r < num_rows) & (c < I), other=0.0).to(tl.float32))
    tl.atomic_max(row_bits + matrix * num_rows + row, tl.max(bits, axis=1), mask=row < num_rows, sem="relaxed")
    tl.atomic_max(column_bits + matrix * I + column, tl.max(bits, axis=0), mask=column < I, sem="relaxed")


@triton.jit
def fp8_cast_rowwise(
    x,
    rows,
    columns,
    row_bits,
    column_bits,
    row_inverses,
    column_inverses,
    num_rows,
    padded_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    POWER: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """x [W, N, I] with a scale for each row, and transposed with a scale for each column."""
    matrix = tl.program_id(1).to(tl.int64)
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    inside = (r < num_rows) & (c < I)
    value = tl.load(x + matrix * num_rows * I + r * I + c, mask=inside, other=0.0).to(tl.float32)
    at_row, at_column = matrix * num_rows + row, matrix * I + column
    scale, inverse = _scale(tl.load(row_bits + at_row, mask=row < num_rows, other=0), False, POWER)
    if tl.program_id(0) % num_lines == 0:
        tl.store(row_inverses + at_row, inverse, mask=row < num_rows)
    numbers = _numbers(value, scale[:, None], False)
    tl.store(rows + matrix * num_rows * I + r * I + c, numbers, mask=inside)
    scale, inverse = _scale(tl.load(column_bits + at_column, mask=column < I, other=0), False, POWER)
    if tl.program_id(0) < num_lines:
        tl.store(column_inverses + at_column, inverse, mask=column < I)
    numbers = tl.where(inside, _numbers(value, scale[None, :], False), 0)
    at = columns + matrix * padded_rows * I + column[:, None].to(tl.int64) * padded_rows + row[None, :]
    tl.store(at, tl.trans(numbers), mask=(column[:, None] < I) & (row[None, :] < padded_rows))


@triton.jit
def fp8_cast_lines(
    x,
    rows,
    columns,
    row_inverses,
    column_inverses,
    num_rows,
    padded_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    TILE: tl.constexpr,
):
    """x [N, I] with a scale for TILE consecutive numbers of a row, and transposed with one for TILE of a column.

    The inverses are [I / TILE, P] and [P / TILE, I]. Rows of the padding are zero.
    """
    row, column = _tile(num_lines, TILE, TILE)
    r, c = row[:, None], column[None, :]
    value = tl.load(x + r * I + c, mask=r < num_rows, other=0.0).to(tl.float32)
    bits = _bits(value)
    scale, inverse = _scale(tl.max(bits, axis=1), False, True)
    tl.store(row_inverses + (tl.program_id(0) % num_lines).to(tl.int64) * padded_rows + row, inverse)
    tl.store(rows + r * I + c, _numbers(value, scale[:, None], False))
    scale, inverse = _scale(tl.max(bits, axis=0), False, True)
    tl.store(column_inverses + (tl.program_id(0) // num_lines).to(tl.int64) * I + column, inverse)
    numbers = _numbers(value, scale[None, :], False)
    tl.store(columns + column[:, None].to(tl.int64) * padded_rows + row[None, :], tl.trans(numbers))


@triton.jit
def fp8_cast_blocks(
    weight,
    rows,
    columns,
    row_inverses,
    column_inverses,
    num_outputs,
    num_lines,
    row_stride,
    column_stride,
    I: tl.constexpr,  # noqa: E741
    TILE: tl.constexpr,
):
    """weight [O, I] with a scale per block [TILE, TILE]; row_inverses [O / TILE, *], column_inverses [I / TILE, *]."""
    row, column = _tile(num_lines, TILE, TILE)
    r, c = row[:, None], column[None, :]
    value = tl.load(weight + r * I + c).to(tl.float32)
    scale, inverse = _scale(tl.max(tl.max(_bits(value), axis=1), axis=0), False, True)
    line, block = tl.program_id(0) // num_lines, tl.program_id(0) % num_lines
    tl.store(row_inverses + line * row_stride + block, inverse)
    tl.store(column_inverses + block * column_stride + line, inverse)
    numbers = _numbers(value, scale, False)
    tl.store(rows + r * I + c, numbers)
    tl.store(columns + column[:, None].to(tl.int64) * num_outputs + row[None, :], tl.trans(numbers))


@triton.jit
def _group_of_tile(ends, num_groups, GROUPS: tl.constexpr, TILE_N: tl.constexpr):
    """(group of this program's tile, its first row, the end of the group's rows, ends of padded groups [GROUPS]).

    Every group of rows is padded to whole tiles. A tile after the groups has no rows.
    """
    g = tl.arange(0, GROUPS)
    stop = tl.load(ends + g, mask=g < num_groups, other=0)
    start = tl.load(ends + g - 1, mask=(g > 0) & (g < num_groups), other=0)
    length = tl.where(g < num_groups, (stop - start + TILE_N - 1) // TILE_N * TILE_N, 0)
    padded_stop = tl.cumsum(length, 0)
    position = tl.program_id(0) * TILE_N
    group = tl.sum((padded_stop <= position).to(tl.int32), axis=0)
    first = tl.sum(tl.where(g == group, start + position - (padded_stop - length), 0), axis=0)
    end = tl.sum(tl.where(g == group, stop, 0), axis=0)
    return group, first, end, padded_stop


@triton.jit
def fp8_largest_of_groups(
    x,
    ends,
    row_bits,
    column_bits,
    num_groups,
    I: tl.constexpr,  # noqa: E741
    GROUPS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """Raise row_bits [M] to those of x [M, I], and column_bits [e, I] to those of each group."""
    group, first, end, _ = _group_of_tile(ends, num_groups, GROUPS, TILE_N)
    if first < end:
        row = first.to(tl.int64) + tl.arange(0, TILE_N)
        column = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
        inside = (row[:, None] < end) & (column[None, :] < I)
        bits = _bits(tl.load(x + row[:, None] * I + column[None, :], mask=inside, other=0.0).to(tl.float32))
        tl.atomic_max(row_bits + row, tl.max(bits, axis=1), mask=row < end, sem="relaxed")
        tl.atomic_max(column_bits + group * I + column, tl.max(bits, axis=0), mask=column < I, sem="relaxed")


@triton.jit
def fp8_cast_groups(
    x,
    ends,
    rows,
    columns,
    row_bits,
    column_bits,
    row_inverses,
    column_inverses,
    column_ends,
    num_groups,
    padded_rows,
    I: tl.constexpr,  # noqa: E741
    POWER: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """x [M, I] with a scale for each row, and transposed with a scale for each column of each group."""
    group, first, end, padded_stop = _group_of_tile(ends, num_groups, GROUPS, TILE_N)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        g = tl.arange(0, GROUPS)
        tl.store(column_ends + g, padded_stop, mask=g < num_groups)
    row = first.to(tl.int64) + tl.arange(0, TILE_N)
    column = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
    at = row[:, None] * I + column[None, :]
    inside = (row[:, None] < end) & (column[None, :] < I)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _scale(tl.load(row_bits + row, mask=row < end, other=0), False, POWER)
    if tl.program_id(1) == 0:
        tl.store(row_inverses + row, inverse, mask=row < end)
    tl.store(rows + at, _numbers(value, scale[:, None], False), mask=inside)
    known = column < tl.where(first < end, I, 0)
    bits = tl.load(column_bits + group * I + column, mask=known, other=0)
    scale, inverse = _scale(bits, False, POWER)
    tl.store(column_inverses + group * I + column, inverse, mask=known)
    numbers = tl.where(inside, _numbers(value, scale[None, :], False), 0)
    position = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    target = columns + column[:, None].to(tl.int64) * padded_rows + position[None, :]
    tl.store(target, tl.trans(numbers), mask=column[:, None] < I)


@triton.jit
def fp8_add_groups(total, products, ends, size, STALE: tl.constexpr, BLOCK: tl.constexpr):
    """total [e, size] += products [e, size], or = with STALE; a group without rows has the product 0.

    A program processes BLOCK numbers of a group. Products of groups without rows are not read.
    """
    group = tl.program_id(1)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = group.to(tl.int64) * size + at
    known = at < size
    value = tl.load(products + target, mask=known & (tl.load(ends + group) > first), other=0.0).to(tl.float32)
    if not STALE:
        value += tl.load(total + target, mask=known, other=0.0).to(tl.float32)
    tl.store(total + target, value, mask=known)
