"""The global order of a split's samples, from one data set or a blend, in an endless sequence of rounds."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError
from mplug_indexed.cache import Cache, digest
from mplug_indexed.indices import (
    SURPLUS,
    Blend,
    Cut,
    Epochs,
    Indices,
    build_blend,
    build_indices,
    normalize,
    samples_of,
    total,
)
from mplug_indexed.reader import Reader

FORMAT = 1
"""Version of the cache's content; incremented when the same description gives different indices."""


NUM_LOOKS, LOOK = 64, 1024
"""The number of places at which a fingerprint reads tokens, and the number of tokens at each."""


@dataclass(frozen=True)
class Part:
    """The sequences of a data set in one split."""

    reader: Reader
    sequences: range

    @cached_property
    def verified(self) -> Reader:
        """The data set, after a check of every entry of its index."""
        self.reader.verify()
        return self.reader

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of the sequences."""
        return total(self.reader.lengths, self.sequences)

    def without_tokens(self) -> UsageError:
        """The error for a part without tokens."""
        remedy = "increase its share, or remove the data set"
        return UsageError(f"'{self.reader.prefix}' has no tokens in this part of data.split; {remedy}")

    def repeated(self, cut: Cut, split: str) -> list[str]:
        """The sentence about a part that is too short for a sample, so that samples are cut from its repetitions.

        Raises UsageError if it has no tokens.
        """
        if not self.tokens:
            raise self.without_tokens()
        if cut.samples(self.tokens) > 0:
            return []
        return [
            f"the {split} part of '{self.reader.prefix}' has {self.tokens} tokens, and a sample of "
            f"trainer.seq_length={cut.seq_length} takes {cut.seq_length + cut.extra}; samples are cut from its "
            f"repetitions"
        ]

    @cached_property
    def digest(self) -> str:
        """A hash of all lengths of the data set."""
        return digest(self.reader.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all lengths and of evenly spaced samples of the tokens; the whole data set is too large to read."""
        tokens = self.reader.tokens
        starts = range(0, len(tokens), max(len(tokens) // NUM_LOOKS, 1))
        looks = [np.empty(0, tokens.dtype), *(tokens[start : start + LOOK] for start in starts)]
        return f"{self.digest} {tokens.nbytes} {digest(np.concatenate(looks))}"


class Round(NamedTuple):
    """The indices of every data set, and for a blend the data set of each sample."""

    indices: list[Indices]
    blend: Blend | None


class Place(NamedTuple):
    """Places of samples of one data set: `rows` of the output are read from `begins` to `ends` [document, offset]."""

    part: Part
    documents: NDArray[Any]
    begins: NDArray[Any]
    ends: NDArray[Any]
    rows: NDArray[np.int64]


@dataclass
class Order:
    """The order of a split; `samples` is the number of samples drawn per round, None for one epoch.

    Round 0 is Megatron's order for that number of samples. Each further round is drawn with the next seed. Without
    weights, several data sets are read completely, mixed in proportion to their sizes. A part that is shorter than a
    sample is read in as many epochs as its samples need.
    """

    parts: Sequence[Part]
    weights: Sequence[float] | None
    cut: Cut
    seed: int
    samples: int | None
    cache: Cache
    _current: tuple[int, Round] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for part in self.parts:
            if not part.tokens:
                raise part.without_tokens()
        if self.weights is not None and self.samples is None:
            raise UsageError("data.samples=epoch does not support weights in data.path; use a number, or 'run'")
        self._refuse_too_many()

    def _refuse_too_many(self) -> None:
        """Refuse an order whose indices exceed the machine's memory, because of a typo in a number for example."""
        size = 10 * self.size if self.is_blend else 0
        for part, epochs in zip(self.parts, self.epochs(self.samples), strict=True):
            size += 4 * epochs.number * len(part.sequences) + 12 * self.cut.samples(epochs.number * part.tokens)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise UsageError(
                f"the order of {self.size:,} samples needs {size >> 30:,} GiB, and this machine has {memory >> 30:,} "
                f"GiB of memory; set a smaller data.samples, after which a new order begins"
            )

    @property
    def fingerprint(self) -> str:
        """A hash of the data sets, in order, and of their weights; independent of their location."""
        text = repr(([part.fingerprint for part in self.parts], self.weights))
        return digest(np.frombuffer(text.encode(), np.uint8))

    @property
    def is_blend(self) -> bool:
        """Whether samples come from several data sets."""
        return len(self.parts) > 1 or self.weights is not None

    def epochs(self, samples: int | None) -> list[Epochs]:
        """How often each data set is read for `samples` samples; together with the seed, this determines the order."""
        if self.weights is not None:
            assert samples is not None
            counts: list[int | None] = [*samples_of(samples, normalize(self.weights), SURPLUS)]
        else:
            counts = [None if self.is_blend else samples] * len(self.parts)
        return [self.cut.epochs(part.tokens, count) for part, count in zip(self.parts, counts, strict=True)]

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of a round if it has each sample of all data sets once, else None."""
        if self.weights is not None or any(epochs.number > 1 for epochs in self.epochs(self.samples)):
            return None
        return self.size

    @cached_property
    def size(self) -> int:
        """The number of samples of a round, the same for all rounds."""
        if self.weights is not None:
            assert self.samples is not None
            return sum(samples_of(self.samples, normalize(self.weights)))
        each = zip(self.parts, self.epochs(self.samples), strict=True)
        return sum(self.cut.samples(epochs.number * part.tokens) for part, epochs in each)

    def round(self, number: int) -> Round:
        """The indices of a round."""
        if self._current is None or self._current[0] != number:
            self._current = None  # frees the last round's memory
            self._current = (number, self._draw(self.seed + number))
        return self._current[1]

    def _draw(self, seed: int) -> Round:
        epochs = self.epochs(self.samples)
        indices = [self._indices(part, times, seed) for part, times in zip(self.parts, epochs, strict=True)]
        return Round(indices, self._blend([len(index.shuffle) for index in indices]) if self.is_blend else None)

    def _indices(self, part: Part, epochs: Epochs, seed: int) -> Indices:
        def make() -> dict[str, NDArray[Any]]:
            return build_indices(lengths, part.sequences, self.cut, epochs, seed % 2**32)._asdict()

        lengths = part.verified.lengths  # verified even for cached indices, which do not hold pointers
        cut = [self.cut.seq_length, self.cut.extra, self.cut.keep_rest]
        description = {
            "format": FORMAT,
            "lengths": part.digest,
            "sequences": [part.sequences.start, part.sequences.stop],
            "cut": cut,
            "epochs": [epochs.number, epochs.before_last],
            "seed": seed % 2**32,
        }
        return Indices(**self.cache.get(description, make))

    def _blend(self, sizes: list[int]) -> Blend:
        """The data set of each sample, given the number of samples of each data set."""
        # Megatron normalizes given weights twice, which can change the last bit.
        weights = normalize(sizes) if self.weights is None else normalize(normalize(self.weights))
        limits = sizes if self.weights is None else None
        description = {"format": FORMAT, "blend": weights, "size": self.size, "limits": limits, "sizes": sizes}

        def make() -> dict[str, NDArray[Any]]:
            blend, counts = build_blend(weights, self.size, limits)
            for part, count, available in zip(self.parts, counts, sizes, strict=True):
                if count > available:
                    raise UsageError(
                        f"the blend needs {count} samples of '{part.reader.prefix}', which has {available}: "
                        f"{self.samples} samples are too few for {len(sizes)} data sets; set a larger data.samples"
                    )
            return blend._asdict()

        return Blend(**self.cache.get(description, make))

    def places(self, sample_ids: range) -> Iterator[Place]:
        """The places of samples of the global order."""
        at = sample_ids.start
        while at < sample_ids.stop:
            number, first = divmod(at, self.size)
            last = min(first + sample_ids.stop - at, self.size)
            yield from self._places(self.round(number), slice(first, last), at - sample_ids.start)
            at += last - first

    def _places(self, drawn: Round, wanted: slice, row: int) -> Iterator[Place]:
        if drawn.blend is None:
            numbers = np.arange(wanted.start, wanted.stop)
            yield self._place(drawn, 0, numbers, row + np.arange(len(numbers)))
            return
        which, numbers = drawn.blend.which[wanted], drawn.blend.sample[wanted]
        for part in np.unique(which).tolist():
            (rows,) = np.nonzero(which == part)
            yield self._place(drawn, part, numbers[rows], row + rows)

    def _place(self, drawn: Round, part: int, numbers: NDArray[Any], rows: NDArray[np.int64]) -> Place:
        indices = drawn.indices[part]
        cuts = indices.shuffle[numbers].astype(np.int64)
        return Place(self.parts[part], indices.document, indices.sample[cuts], indices.sample[cuts + 1], rows)

    def most_pieces(self) -> int:
        """The maximum number of sequences that a sample of the first round touches."""
        most = 0
        for indices in self.round(0).indices:
            for start in range(0, len(indices.sample) - 1, 1 << 20):
                most = max(most, int(np.diff(indices.sample[start : start + (1 << 20) + 1, 0]).max()) + 1)
        return most
