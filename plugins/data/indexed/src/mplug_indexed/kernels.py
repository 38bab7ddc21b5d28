"""Loops over samples and tokens, compiled by numba; numpy alone would need temporaries of many times the size.

They release the GIL. Compiled code is cached beside this file or in the user's cache folder, so that only the first
process on a machine compiles. Shapes: `B` samples of a micro batch, `S` sequence length, `W` tokens of a
sample (S and the extra one), `M` documents of a sample at most, `D` entries of a document index.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import uint64
from numpy.typing import NDArray


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, compiled on its first call with given types."""
    found: Callable[..., Any]
    try:
        found = numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # neither this folder nor the user's cache is writable
        found = numba.njit(nogil=True)(kernel)
    return found


@compiled
def swap_some(order: NDArray[Any], remaining: int, draws: NDArray[np.uint64]) -> tuple[int, int]:
    """Continue a Fisher-Yates shuffle from the last entry down, as far as the draws suffice.

    `order` [N] is finished from entry `remaining` on. Entry i is swapped with one of 0 to i: the next draw, masked to
    the bits of i, that is not above i. Beyond 32 bits, two draws make one number. Returns the new `remaining` and the
    number of used draws. Places are drawn in blocks before entries move, so that memory latencies overlap.
    """
    places = np.empty(4096, dtype=np.int64)
    used = 0
    while remaining > 1:
        last = remaining - 1
        wide = last > 0xFFFFFFFF
        mask = uint64(1)
        while mask < uint64(last):
            mask = mask << uint64(1) | uint64(1)
        # This mask holds for entries down to `lowest`.
        lowest = max(int(mask >> uint64(1)) + 1, 1)
        number, most = 0, min(len(places), remaining - lowest)
        while number < most and used + wide < len(draws):
            draw = draws[used]
            if wide:
                draw = draw << uint64(32) | draws[used + 1]
            used += 1 + wide
            places[number] = np.int64(draw & mask)
            number += places[number] <= last - number
        for k in range(number):
            i, j = last - k, places[k]
            order[i], order[j] = order[j], order[i]
        remaining -= number
        if number < most:
            break
    return remaining, used


@compiled
def fill_sample_index(
    lengths: NDArray[Any], documents: NDArray[Any], seq_length: int, extra: int, index: NDArray[Any]
) -> None:
    """Fill `index` [N + 1, 2]: row k [document, offset] is where sample k begins and sample k - 1 ends.

    One pass over the documents: token k * S + extra - 1 of the stream is the last that sample k - 1 needs.
    """
    index[0, 0], index[0, 1] = 0, 0
    row, start, needed = 1, 0, seq_length + extra - 1
    for document in range(len(documents)):
        end = start + lengths[documents[document]]
        while row < len(index) and needed < end:
            index[row, 0], index[row, 1] = document, row * seq_length - start
            row += 1
            needed += seq_length
        start = end
    for late in range(row, len(index)):
        index[late, 0] = len(documents) - 1
        index[late, 1] = lengths[documents[-1]] - extra


@compiled
def fill_blend(
    weights: NDArray[Any], capacity: NDArray[Any], which: NDArray[Any], sample: NDArray[Any]
) -> NDArray[Any]:
    """Fill a blend: sample i is from the data set that lags most behind its weight, among those with samples left.

    Ties go to the first data set. `which` [N] is the number of the data set, `sample` [N] the number of the sample
    within it. The lag is `weight * max(i, 1) - taken` in fp64; product and difference are each rounded. `capacity` is
    in samples, or -1 if unlimited. Returns the number of samples taken from each data set.
    """
    taken = np.zeros(len(weights))
    for i in range(len(which)):
        place = float(max(i, 1))
        best, lag = 0, weights[0] * place - taken[0]
        for n in range(1, len(weights)):
            found = weights[n] * place - taken[n]
            if found > lag:
                best, lag = n, found
        which[i], sample[i] = best, np.int64(taken[best])
        taken[best] += 1.0
        if taken[best] == capacity[best]:
            taken[best] = np.inf
    return np.where(taken == np.inf, capacity, taken)


@compiled
def fill_samples(
    tokens: NDArray[Any],
    starts: NDArray[Any],
    lengths: NDArray[Any],
    documents: NDArray[Any],
    begins: NDArray[Any],
    ends: NDArray[Any],
    extra: int,
    padding: int,
    rows: NDArray[Any],
    out: NDArray[Any],
) -> int:
    """Write the sample from `begins[n]` to `ends[n]` [document, offset] to row `rows[n]` of `out` [B, W].

    `tokens` is the whole `.bin`, and `starts` are in bytes. Returns -1, or the number of a sequence that exceeds it.
    """
    itemsize = tokens.itemsize
    for n in range(len(rows)):
        row, place = out[rows[n]], 0
        for document in range(begins[n, 0], ends[n, 0] + 1):
            sequence = documents[document]
            first = np.int64(begins[n, 1]) if document == begins[n, 0] else 0
            last = np.int64(ends[n, 1]) + extra if document == ends[n, 0] else np.int64(lengths[sequence])
            at = starts[sequence] // itemsize + first
            count = int(last - first)
            if place + count > len(row):
                count = len(row) - place
            if at < 0 or at + count > len(tokens):
                return int(sequence)
            for k in range(count):
                row[place + k] = tokens[at + k]
            place += max(count, 0)
        row[place:] = padding
    return -1


@compiled
def mark_documents(tokens: NDArray[Any], eod: int, positions: NDArray[Any], lengths: NDArray[Any]) -> int:
    """Fill `positions`, from 0 in each document, and `lengths` [B, M]; `eod` ends a document of `tokens` [B, S].

    `lengths` must be zeros. Returns the maximum number of documents in a row; above M, `lengths` are incomplete.
    """
    most = 0
    for row in range(len(tokens)):
        document, begin = 0, 0
        for k in range(tokens.shape[1]):
            positions[row, k] = k - begin
            if tokens[row, k] == eod or k == tokens.shape[1] - 1:
                if document < lengths.shape[1]:
                    lengths[row, document] = k + 1 - begin
                document, begin = document + 1, k + 1
        most = max(most, document)
    return most


@compiled
def _hash(bits: Any) -> Any:
    """splitmix64's finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    bits = (bits ^ (bits >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> uint64(27))) * uint64(0x94D049BB133111EB)
    return bits ^ (bits >> uint64(31))


@compiled
def _uniform(key: Any, counter: Any) -> float:
    """A pseudo-random number in [0, 1) of 53 bits, a function of a key and a counter."""
    bits = _hash(key + uint64(counter) * uint64(0x9E3779B97F4A7C15))
    return float(bits >> uint64(11)) * 2.0**-53


@compiled
def fill_in_the_middle(
    window: NDArray[Any],
    numbers: NDArray[Any],
    key: int,
    eod: int,
    padding: int,
    rates: tuple[float, float],
    sentinels: tuple[int, int, int],
) -> None:
    """Split documents of `window` [B, W] into prefix, middle and suffix at two uniform places, and put the middle last.

    With probability `rates[0]`, a document becomes PRE prefix SUF suffix MID middle; a share `rates[1]` of these
    becomes PRE SUF suffix MID prefix middle. The suffix loses three tokens, so that the length stays the same. If the
    suffix has three tokens or fewer, the document is unchanged. `sentinels` are PRE, MID, SUF; `numbers` [B] are those
    of the samples.
    """
    pre, mid, suf = sentinels
    whole = np.empty(window.shape[1], dtype=np.int64)
    for n in range(len(window)):
        row, draw = window[n], 0
        own = _hash(uint64(key) + uint64(numbers[n]) * uint64(0x9E3779B97F4A7C15))
        stop = len(row)
        while stop > 0 and row[stop - 1] == padding:
            stop -= 1
        begin = 0
        for k in range(stop + 1):
            if k < stop and row[k] != eod:
                continue
            length = k - begin
            first = int(_uniform(own, draw + 2) * (length + 1))
            second = int(_uniform(own, draw + 3) * (length + 1))
            low, high = min(first, second), max(first, second)
            if _uniform(own, draw) < rates[0] and length - high > 3:
                whole[:length] = row[begin:k]
                kept = length - high - 3
                row[begin] = pre
                at = begin + 1
                if _uniform(own, draw + 1) < rates[1]:
                    row[at] = suf
                    row[at + 1 : at + 1 + kept] = whole[high : high + kept]
                    row[at + 1 + kept] = mid
                    row[at + 2 + kept : k] = whole[:high]
                else:
                    row[at : at + low] = whole[:low]
                    row[at + low] = suf
                    row[at + low + 1 : at + low + 1 + kept] = whole[high : high + kept]
                    row[at + low + 1 + kept] = mid
                    row[at + low + 2 + kept : k] = whole[low:high]
            begin, draw = k + 1, draw + 4
