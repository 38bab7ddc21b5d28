"""The tokens of each sample of a data set, by the rules of Megatron's GPT data sets: the same seed, the same order.

All documents of a split, in a shuffled order (`document` index), form one stream of tokens. It is cut into consecutive
samples (`sample` index), which are shuffled again (`shuffle` index). Sample i begins at row `shuffle[i]` of the sample
index and ends at the next row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError

SEPARATE_BELOW = 0.80
"""If less than this share of the last epoch's samples is used, that epoch is shuffled separately."""
SURPLUS = 0.005
"""A blend draws this share more samples from its data sets than it needs."""
LARGEST_BLEND = 32_767
"""Maximum number of data sets in a blend: their numbers are i16."""


def parse_split(text: str) -> list[tuple[float, float] | None]:
    """'969,30,1' -> the parts (low, high) of the sequences for training, validation and test; None if empty."""
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(math.isfinite(part) and part >= 0 for part in parts) or not sum(parts):
        raise UsageError(
            f"data.split '{text}' is not a list of one to three shares (training, validation, test); use numbers such "
            f"as '969,30,1'"
        )
    shares = normalize([*parts, *[0.0] * (3 - len(parts))])
    borders = [0.0]
    for share in shares:
        borders.append(borders[-1] + share)
    return [(low, high) if low < high else None for low, high in pairwise(borders)]


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()  # type: ignore[no-any-return]


def sequences_of(part: tuple[float, float], count: int) -> range:
    """The sequences of a part, out of `count`."""
    return range(*(round(border * float(count)) for border in part))


@dataclass(frozen=True)
class Epochs:
    """How often a data set is read: `number` times.

    If the last epoch is shuffled separately, it begins after `before_last` samples; else `before_last` is None.
    """

    number: int
    before_last: int | None


@dataclass(frozen=True)
class Cut:
    """How a stream is cut into samples of S tokens; `extra` is 1 if the last label is the token after them.

    With `keep_rest`, the remaining tokens form a last, padded sample.
    """

    seq_length: int
    extra: int
    keep_rest: bool = False

    def samples(self, tokens: int) -> int:
        """The number of samples in a stream of `tokens` tokens."""
        if self.keep_rest:
            # Megatron divides in fp32: above 2^24 tokens, the number of samples may be slightly off.
            return math.ceil(np.float32(tokens - self.extra) / np.float32(self.seq_length))
        return (tokens - self.extra) // self.seq_length

    def epochs(self, tokens: int, samples: int | None) -> Epochs:
        """How often a stream of `tokens` must be read for `samples` samples.

        None means once, or until there is one sample, if the stream is shorter.
        """
        if samples is None:
            return Epochs(1 if self.samples(tokens) > 0 else -(-(self.seq_length + self.extra) // tokens), None)
        number = max(1, -(-(samples * self.seq_length + self.extra) // tokens))
        if number == 1:
            return Epochs(1, None)
        before_last = ((number - 1) * tokens - self.extra) // self.seq_length
        whole = (tokens - self.extra) // self.seq_length
        separate = samples - before_last < int(SEPARATE_BELOW * whole)
        return Epochs(number, before_last if separate else None)


class Indices(NamedTuple):
    """`document` [D] i32, `sample` [N + 1, 2] i32 or i64, `shuffle` [N] u32 or i64."""

    document: NDArray[Any]
    sample: NDArray[Any]
    shuffle: NDArray[Any]


def build_indices(lengths: NDArray[Any], sequences: range, cut: Cut, epochs: Epochs, seed: int) -> Indices:
    """The indices of one split's `sequences`; `lengths` are those of all sequences of the data set."""
    from mplug_indexed.kernels import fill_sample_index

    shuffle = Shuffle(seed)
    document = _documents(sequences, epochs, shuffle)
    count = cut.samples(epochs.number * total(lengths, sequences))
    wide = max(len(document), int(lengths.max(initial=0))) > np.iinfo(np.int32).max
    sample = np.empty((count + 1, 2), dtype=np.int64 if wide else np.int32)
    fill_sample_index(lengths, document, cut.seq_length, cut.extra, sample)
    return Indices(document, sample, _shuffled(count, epochs.before_last, shuffle))


def total(lengths: NDArray[Any], sequences: range) -> int:
    """The number of tokens of some sequences."""
    return int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


class Shuffle:
    """A faster `numpy.random.RandomState(seed).shuffle` for successive arrays, with the same resulting orders.

    The random numbers come from numpy's generator.
    """

    DRAWS = 2**15

    def __init__(self, seed: int) -> None:
        self.generator = np.random.MT19937()
        self.generator.state = np.random.RandomState(seed).get_state(legacy=False)
        self.draws = np.empty(0, dtype=np.uint64)

    def __call__(self, order: NDArray[Any]) -> None:
        """Shuffle an array of one dimension in place."""
        from mplug_indexed.kernels import swap_some

        remaining = len(order)
        while remaining > 1:
            remaining, used = swap_some(order, remaining, self.draws)
            self.draws = self.draws[used:]
            if remaining > 1:
                self.draws = np.concatenate([self.draws, self.generator.random_raw(self.DRAWS)])


def _documents(sequences: range, epochs: Epochs, shuffle: Shuffle) -> NDArray[np.int32]:
    """Every sequence once per epoch, shuffled over all epochs except a separate last one."""
    document = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), epochs.number)
    if epochs.before_last is None:
        shuffle(document)
    else:
        border = len(document) - len(sequences)
        shuffle(document[:border])
        shuffle(document[border:])
    return document


def _shuffled(count: int, border: int | None, shuffle: Shuffle) -> NDArray[Any]:
    """The numbers below `count`, shuffled; those from `border` on are shuffled separately."""
    order = np.arange(count, dtype=np.int64 if count >= np.iinfo(np.uint32).max - 1 else np.uint32)
    shuffle(order[:border])
    if border is not None and border < count:
        shuffle(order[border:])
    return order


# Blends.


def samples_of(size: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """The number of samples of each data set in a blend of about `size` samples; `weights` add up to 1."""
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]


class Blend(NamedTuple):
    """For every sample, the number of its data set (i16) and its number within that data set (i64)."""

    which: NDArray[np.int16]
    sample: NDArray[np.int64]


def build_blend(
    weights: Sequence[float], size: int, capacities: Sequence[int] | None = None
) -> tuple[Blend, list[int]]:
    """(the first `size` samples of a blend by weights, the number of samples of each data set).

    A data set with a capacity, in samples, is skipped once it is exhausted.
    """
    from mplug_indexed.kernels import fill_blend

    if len(weights) > LARGEST_BLEND:
        raise UsageError(
            f"data.path names {len(weights)} data sets, and a blend has at most {LARGEST_BLEND}; merge some with "
            f"'mplug data merge'"
        )
    blend = Blend(np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64))
    limits = np.array([-1] * len(weights) if capacities is None else capacities, dtype=np.float64)
    counts = fill_blend(np.array(weights, dtype=np.float64), limits, *blend)
    return blend, counts.astype(np.int64).tolist()
