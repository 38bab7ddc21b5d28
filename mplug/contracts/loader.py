"""What a plugin of the kind `data` builds.

Shapes: `B` samples of a micro batch, `S` sequence length, `M` documents of a sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mplug.contracts.micro_batch import MicroBatch


class Stateful(Protocol):
    """An object whose state a checkpoint holds. The state consists of tensors and plain data only."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in tensors, numbers, strings, lists and mappings."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, so that the object continues exactly from the point at which `state` was taken."""


class Loader(ABC):
    """The base class of loaders: one split of a data set, in one global order of samples.

    The order does not depend on the layout. The state (`Stateful`) is that of the global order, not of a rank: a
    checkpoint holds rank 0's state, and any number of ranks loads it. If each rank has state of its own (buffers,
    worker processes), the loader defines `merge_states`. Such a loader loads both a merged state and its own state. It
    raises UsageError for a state from which it cannot continue, before it reads data or changes anything.
    """

    vocab_size: int
    """Every token is less than this."""
    samples_per_epoch: int | None = None
    """For a finite set: this number of consecutive samples, from the first on, is the whole set."""
    tokenizer: Mapping[str, Any] | None = None
    """The record of the tokenizer that made the data (`TokenizerRecord.as_mapping`). The run's record keeps it."""
    fingerprint: str | None = None
    """A short text that is equal for equal samples, wherever their files are, and differs for others.

    Checkpoints hold it. A run whose data has another fingerprint does not resume.
    """
    merge_states: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
    """Takes the states of all parts of the batch, in their order, and returns the one that a checkpoint holds."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, as `Stateful.state_dict`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, as `Stateful.load_state_dict`."""

    @abstractmethod
    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's part of the next `num_samples` global samples, in micro batches of whole samples.

        Entries: `tokens` [B, S], `labels` [B, S] (already shifted; -100 for a position without a target), `positions`
        [1 or B, S] and `sample_ids` [B] (a sample's number in the global order). They are CPU tensors; the host moves
        them to the device. The host holds several micro batches at a time, so the loader must not reuse their memory
        for later ones.

        A loader that packs documents into samples declares this in the hook `batch_entries`, and adds
        `document_lengths` [B, M], int64: the lengths in the order of the documents in the sample. Each row sums to S
        and is padded with zeros; M is the same in every micro batch. The loader decides whether positions restart with
        each document.

        A loader whose targets differ in importance declares `loss_weights` [B, S] in the same way: floating-point
        numbers of at least 0, which multiply the losses of the labels. The loss of a step is the sum of these products
        over all ranks and micro batches, divided by the number of targets, whatever their weights are.

        A loader of sequences that an objective compares declares `sequences` [B, S], int64, and perhaps
        `reference_log_probabilities` [B, S] in the same way (`mplug.SEQUENCES`, `mplug.REFERENCE`). One of rollouts
        also declares `advantages` and perhaps `sampled_log_probabilities` [B, S] (`mplug.ADVANTAGES`, `mplug.SAMPLED`).
        One with a teacher's probabilities declares `top_tokens` and `top_log_probabilities` (`mplug.TOP_TOKENS`).

        A plugin whose samples the model itself computes keeps the model of the hook `training_built`. It computes them
        in this call, not when the iterator is read: the passes of the step have not begun yet, and all ranks are here.

        If the model has streams (`mplug.Stream`), every micro batch has their entries, which the loader declares in
        `batch_entries` too: at least one group of rows, also where no sample has any.
        """
