"""A loader that masks the samples of another one."""

from collections.abc import Iterator
from typing import Any

from mplug import Loader, MicroBatch
from mplug_masked.masks import Masks


class MaskedLoader(Loader):
    """The samples of `inner` with masks. The order and the state are those of `inner`."""

    def __init__(self, inner: Loader, masks: Masks) -> None:
        self.inner, self.masks = inner, masks
        self.vocab_size = max(inner.vocab_size, masks.mask + 1)
        self.samples_per_epoch, self.tokenizer = inner.samples_per_epoch, inner.tokenizer
        self.merge_states = inner.merge_states
        if inner.fingerprint is not None:
            self.fingerprint = f"{inner.fingerprint}-{masks.fingerprint}"

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        return (self.masks.apply(batch) for batch in self.inner.take(num_samples))

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the loader inside."""
        self.inner.load_state_dict(state)
