"""Reads micro batches of samples. B samples, S sequence length, W = S + extra, M documents of a sample."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mplug import MapLoader, UsageError
from mplug_indexed.kernels import fill_in_the_middle, fill_samples, mark_documents
from mplug_indexed.order import Order

IGNORED = -100
"""The label of a position without a target."""
NO_TOKEN = -1
"""The internal number of padding if the config names no token; NO_TOKEN - 1 is that of ends of documents."""


@dataclass(frozen=True)
class Middle:
    """Fill in the middle (arXiv 2207.14255): documents are split in three, and the middle is moved to the end.

    `key` and a sample's number determine the affected documents and the places of the splits.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    key: int


@dataclass(frozen=True)
class Treatment:
    """How a sample's tokens are turned into the entries of a micro batch."""

    vocab_size: int
    eod: int | None
    padding: int | None
    mask_eod: bool
    reset_positions: bool
    max_documents: int | None
    """M if attention is confined to documents, else None."""
    middle: Middle | None


class Samples:
    """Reads samples of a global order by their numbers."""

    def __init__(self, order: Order, treatment: Treatment) -> None:
        self.order, self.treatment = order, treatment

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        length, extra, treatment = self.order.cut.seq_length, self.order.cut.extra, self.treatment
        window = self._window(sample_ids)  # [B, W]
        absent = window == self._padding
        outside = (window >= treatment.vocab_size) | ((window < 0) & ~absent)
        if outside.any():
            self._refuse(sample_ids, window, outside)
        inputs = np.where(absent, 0, window)[:, :length]
        labels = np.full(inputs.shape, IGNORED, dtype=np.int64)
        labels[:, : length - 1 + extra] = np.where(absent, IGNORED, window)[:, 1:]
        if treatment.mask_eod:
            labels[window[:, :length] == treatment.eod] = IGNORED
        return {
            "tokens": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "sample_ids": torch.arange(sample_ids.start, sample_ids.stop),
            **self._documents(sample_ids, window[:, :length]),
        }

    @property
    def _padding(self) -> int:
        return NO_TOKEN if self.treatment.padding is None else self.treatment.padding

    @property
    def _eod(self) -> int:
        return NO_TOKEN - 1 if self.treatment.eod is None else self.treatment.eod

    def _window(self, sample_ids: range) -> NDArray[np.int64]:
        extra, padding = self.order.cut.extra, self._padding
        window = np.empty((len(sample_ids), self.order.cut.seq_length + extra), dtype=np.int64)
        for place in self.order.places(sample_ids):
            reader = place.part.reader
            where = (place.documents, place.begins, place.ends, extra, padding, place.rows)
            wrong = fill_samples(reader.tokens, reader.pointers, reader.lengths, *where, window)
            if wrong >= 0:
                raise UsageError(
                    f"'{reader.prefix}.idx' is damaged: sequence {wrong} lies outside its '.bin'; copy both files "
                    f"again, or preprocess again"
                )
        if (m := self.treatment.middle) is not None:
            numbers = np.arange(sample_ids.start, sample_ids.stop)
            rates, sentinels = (m.rate, m.spm_rate), (m.prefix, m.middle, m.suffix)
            fill_in_the_middle(window, numbers, m.key, self._eod, padding, rates, sentinels)
        return window

    def _refuse(self, sample_ids: range, window: NDArray[Any], outside: NDArray[Any]) -> None:
        row = int(outside.any(axis=1).argmax())
        token, number = int(window[row][outside[row]][0]), sample_ids[row]
        prefix = next(place.part.reader.prefix for place in self.order.places(range(number, number + 1)))
        raise UsageError(
            f"sample {number} of '{prefix}' has token {token}, and the vocabulary has {self.treatment.vocab_size} "
            f"tokens; set model.vocab_size (or data.vocab_size) to that of the data's tokenizer"
        )

    def _documents(self, sample_ids: range, tokens: NDArray[np.int64]) -> dict[str, Tensor]:
        """Positions, and document lengths if attention is confined to documents."""
        treatment, length = self.treatment, tokens.shape[1]
        everywhere = {"positions": torch.arange(length)[None]}
        if not treatment.reset_positions and treatment.max_documents is None:
            return everywhere
        positions = np.empty_like(tokens)
        lengths = np.zeros((len(tokens), treatment.max_documents or 0), dtype=np.int64)
        most = mark_documents(tokens, self._eod, positions, lengths)
        if treatment.max_documents is not None and most > treatment.max_documents:
            raise UsageError(
                f"one of the samples {sample_ids.start} to {sample_ids.stop - 1} has {most} documents, and the maximum "
                f"is {treatment.max_documents}; set data.max_documents={most} or more and resume"
            )
        entries = {"positions": torch.from_numpy(positions)} if treatment.reset_positions else everywhere
        return {**entries, **({"document_lengths": torch.from_numpy(lengths)} if treatment.max_documents else {})}


class IndexedLoader(MapLoader):
    """A loader whose state is the number of samples taken, and the number for which the order was drawn."""

    def __init__(self, samples: Samples, *, shard: tuple[int, int], micro_batch_size: int) -> None:
        super().__init__(
            samples.read,
            vocab_size=samples.treatment.vocab_size,
            shard=shard,
            micro_batch_size=micro_batch_size,
            samples_per_epoch=samples.order.samples_per_epoch,
            fingerprint=samples.order.fingerprint,
        )
        self.order = samples.order

    def state_dict(self) -> dict[str, Any]:
        """The number of samples taken, and the one that the order was drawn for (None: an epoch)."""
        return {**super().state_dict(), "drawn_for": self.order.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of samples; raises UsageError if this run's order differs."""
        before, now = state["drawn_for"], self.order.samples
        if before != now and (
            (before is None and self.order.weights is not None) or self.order.epochs(before) != self.order.epochs(now)
        ):
            saved, current = (f"{count} samples" if count else "an epoch" for count in (before, now))
            raise UsageError(
                f"the checkpoint has the order of samples that is drawn for {saved}, and this run draws another one, "
                f"for {current}; set data.samples={before or 'epoch'} to continue in the saved order"
            )
        super().load_state_dict(state)
