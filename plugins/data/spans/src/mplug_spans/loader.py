"""A loader that corrupts the samples of another one."""

from collections.abc import Iterator
from typing import Any

from mplug import Loader, MicroBatch
from mplug_spans.corruption import Corruption


class SpansLoader(Loader):
    """The samples of `inner` with corrupted spans. The order and the state are those of `inner`."""

    def __init__(self, inner: Loader, corruption: Corruption, vocab_size: int) -> None:
        self.inner, self.corruption, self.vocab_size = inner, corruption, vocab_size
        self.samples_per_epoch, self.tokenizer = inner.samples_per_epoch, inner.tokenizer
        self.merge_states = inner.merge_states
        if inner.fingerprint is not None:
            self.fingerprint = f"{inner.fingerprint}-{corruption.fingerprint}"

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        return (self.corruption.apply(batch) for batch in self.inner.take(num_samples))

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the loader inside."""
        self.inner.load_state_dict(state)
