"""A loader for data with random access: the n-th sample can be read directly."""

from collections.abc import Callable, Iterator
from typing import Any

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import MicroBatch


class MapLoader(Loader):
    """A loader with one global order of samples; each data-parallel rank reads its part. Its state is one number.

    `read(sample_ids)` returns the micro batch of these samples of the global order, on the CPU. The order has no end:
    `read` must accept any sample id. `shard` is (index, count): this rank reads the `index`-th of `count` equal parts
    of every global batch. The creator of the loader may set `tokenizer`.
    """

    def __init__(
        self,
        read: Callable[[range], MicroBatch],
        *,
        vocab_size: int,
        shard: tuple[int, int],
        micro_batch_size: int,
        samples_per_epoch: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.read, self.vocab_size, self.shard, self.micro_batch_size = read, vocab_size, shard, micro_batch_size
        self.samples_per_epoch, self.fingerprint = samples_per_epoch, fingerprint
        self.samples = 0

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        first, (index, count) = self.samples, self.shard
        start, stop = (first + num_samples * part // count for part in (index, index + 1))
        self.samples += num_samples
        begins = range(start, stop, self.micro_batch_size)
        return (self.read(range(begin, min(begin + self.micro_batch_size, stop))) for begin in begins)

    def state_dict(self) -> dict[str, Any]:
        """The number of global samples that the run has taken."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of global samples."""
        self.samples = int(state["samples"])
