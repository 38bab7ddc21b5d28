"""Samples of a data set that is encoded while it is read, block by block, and the loader that remembers the place."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mplug import MapLoader, UsageError
from mplug_datasets.reading import Place, Reader
from mplug_datasets.rows import Content, Pair, Tally
from mplug_datasets.samples import Blend, TextSamples
from mplug_datasets.sources import Source, open_rows, rows_of
from mplug_tokenization.packed_samples import PackedSamples

log = logging.getLogger("mplug.datasets")
REMEMBERED = 64
"""Number of earlier blocks that can be read again."""

Samples = PackedSamples | TextSamples


@dataclass
class Position:
    """A place between two rows of the stream: plain data, so that a checkpoint can hold it."""

    first: int = 0
    """The number of the first sample after it."""
    block: int = 0
    epoch: int = 0
    file: int = 0
    """The number of the file in the order of the epoch."""
    row: int = 0
    """Rows of this file before it."""
    library: dict[str, Any] | None = None
    """The library's state of the file; None: its beginning."""
    used: bool = False
    """Whether the epoch has had a document."""


class Stream:
    """Samples of one source. A block of documents is shuffled and packed together; files are shuffled every epoch.

    The samples are a function of the data, the settings and the key; reading goes forward from the position of a block.
    Every rank reads all rows: where a sample begins depends on the documents before it.
    """

    count = None

    def __init__(
        self,
        source: Source,
        reader: Reader,
        block: int,
        pack: Callable[[list[Pair], tuple[int, ...]], Samples],
        key: tuple[int, ...],
        reports: bool,
    ) -> None:
        self.source, self.reader, self.block, self.pack, self.key, self.reports = (
            source,
            reader,
            block,
            pack,
            key,
            reports,
        )
        self.tally = Tally()
        self._starts = [Position()]
        self._next = Position()
        self._samples: Samples | None = None

    @property
    def fingerprint(self) -> str:
        """A digest of the files' sizes, of pieces of their contents, and of the split's share."""
        reading = self.reader.reading
        share = "" if reading.held_out is None else f"-{reading.held_out}-{reading.percent}"
        return self.source.fingerprint() + share

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of one sample."""
        (number,) = sample_ids
        samples, first = self._seek(number)
        return samples.read(range(number - first, number - first + 1))

    def position(self, number: int) -> dict[str, Any]:
        """The position of the block that has a sample."""
        if number > self._starts[-1].first:
            self._seek(number)
        return copy.deepcopy(vars(self._start_before(number)))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        start = Position(**copy.deepcopy(state))
        if self._samples is None or start != self._starts[-1]:
            self._starts, self._samples = [start], None

    def _start_before(self, number: int) -> Position:
        starts = [start for start in self._starts if start.first <= number]
        assert starts, f"sample {number} is before the block of sample {self._starts[0].first}"
        return starts[-1]

    def _seek(self, number: int) -> tuple[Samples, int]:
        """The block that has a sample, and the number of its first sample."""
        start = self._start_before(number)
        if start is not self._starts[-1]:
            self._starts, self._samples = self._starts[: self._starts.index(start) + 1], None
        while True:
            if self._samples is None:
                self._samples, self._next = self._read_block(self._starts[-1])
            first = self._starts[-1].first
            if number < first + self._samples.count:
                return self._samples, first
            self._starts = [*self._starts[-REMEMBERED:], self._next]
            self._samples = None

    def _read_block(self, start: Position) -> tuple[Samples, Position]:
        """The samples of the block at a position, and the position after it."""
        place = copy.deepcopy(start)
        while True:
            contents = list[tuple[Place, Content]]()
            ended = self._fill(place, contents)
            documents = list(self.reader.encoded(contents, self.tally))
            samples = self.pack(documents, (*self.key, start.block))
            place.used |= bool(samples.count)
            if ended:
                self._report(place)
                place.epoch, place.file, place.row, place.library, place.used = place.epoch + 1, 0, 0, None, False
            if samples.count:
                break
        place.first, place.block = start.first + samples.count, start.block + 1
        return samples, place

    def _fill(self, place: Position, contents: list[tuple[Place, Content]]) -> bool:
        """Read the rows of a block from a position, which moves; returns whether the epoch has ended."""
        random = np.random.Generator(np.random.PCG64([*self.key, place.epoch]))
        order = random.permutation(len(self.source.files))
        while place.file < len(order):
            file = self.source.files[order[place.file]]
            rows = open_rows(file, self.reader.cache)
            if rows is not None and place.library is not None:
                rows.load_state_dict(copy.deepcopy(place.library))
            for row in rows_of(file, rows):
                place.row += 1
                content = self.reader.understood(row, (file, place.row), self.tally)
                if content is not None:
                    contents.append(((file, place.row), content))
                if len(contents) == self.block and rows is not None:
                    place.library = copy.deepcopy(rows.state_dict())
                    return False
            place.file, place.row, place.library = place.file + 1, 0, None
        return True

    def _report(self, place: Position) -> None:
        """Refuse a stream that has no documents, and log the first epoch's skipped rows."""
        if not place.used:
            reason = f"; the first damaged row: {self.tally.reason}" if self.tally.reason else ""
            raise UsageError(
                f"'{self.source.path}': no row of the split can be used: of {self.tally.rows}, {self.tally.damaged} "
                f"are damaged ({self.tally.count}){reason}; use other data, or, if this is the validation split, set "
                f"trainer.eval_every=0"
            )
        if place.epoch == 0 and self.reports:
            for sentence in self.tally.sentences():
                log.warning("'%s': %s", self.source.path, sentence)
            log.info("'%s': %d rows in the first epoch (%s)", self.source.path, self.tally.rows, self.tally.count)


class StreamLoader(MapLoader):
    """A loader of streams. Its state is the number of samples, and the position of each stream's block."""

    def __init__(self, streams: Sequence[Stream], blend: Blend, **settings: Any) -> None:
        super().__init__(blend.read, fingerprint=blend.fingerprint, **settings)
        self.streams, self.blend = streams, blend

    def state_dict(self) -> dict[str, Any]:
        """The number of global samples that the run has taken, and positions from which the next ones are read."""
        _, before = self.blend.place(self.samples)
        positions = [stream.position(number) for stream, number in zip(self.streams, before, strict=True)]
        return {**super().state_dict(), "streams": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of global samples."""
        positions = state.get("streams")
        if not isinstance(positions, list) or len(positions) != len(self.streams):
            raise UsageError(
                f"the checkpoint has no positions of {len(self.streams)} streams of data/datasets; resume with the "
                f"data.path and data.streaming of the run that saved it"
            )
        super().load_state_dict(state)
        for stream, position in zip(self.streams, positions, strict=True):
            stream.restore(position)
