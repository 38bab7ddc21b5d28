"""A loader for data with random access: the n-th sample can be read directly."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import MicroBatch
from mplug.training.division import division

Read = Callable[[range], MicroBatch] | Callable[[Sequence[int]], MicroBatch]


class MapLoader(Loader):
    """A loader with one global order of samples; each data-parallel rank reads its part. Its state is one number.

    `read(sample_ids)` returns the micro batch of these samples of the global order, on the CPU. The order has no end:
    `read` must accept any sample id. `shard` is (index, count): this rank reads the `index`-th of `count` equal parts
    of every global batch. The creator of the loader may set `tokenizer`.

    If samples are packed, `documents(sample_id)` may return the lengths of the documents of any sample, without its
    tokens. The host then reports how unequal the work of ranks is, and can balance it (`parallel.balance`). Such a
    loader's `read` takes any sequence of sample ids.
    """

    def __init__(
        self,
        read: Read,
        *,
        vocab_size: int,
        shard: tuple[int, int],
        micro_batch_size: int,
        samples_per_epoch: int | None = None,
        fingerprint: str | None = None,
        documents: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.read, self.vocab_size, self.shard, self.micro_batch_size = read, vocab_size, shard, micro_batch_size
        self.samples_per_epoch, self.fingerprint = samples_per_epoch, fingerprint
        self.documents, self.balances = documents, False
        self.work: Callable[[Sequence[int]], int] | None = None
        self.imbalance: float | None = None
        self.samples = 0

    def weigh(self, work: Callable[[Sequence[int]], int], balances: bool) -> None:
        """From now on, set `imbalance` in every `take`; if it `balances`, divide samples over ranks by their work.

        `work` returns the FLOPs of a sample with documents of these lengths. ValueError without `documents`.
        """
        if self.documents is None:
            raise ValueError("the loader does not state the lengths of documents")
        self.work, self.balances = work, balances

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        own = self._own(range(self.samples, self.samples + num_samples))
        self.samples += num_samples
        read = cast("Callable[[Sequence[int]], MicroBatch]", self.read)
        return (read(own[begin : begin + self.micro_batch_size]) for begin in range(0, len(own), self.micro_batch_size))

    def _own(self, samples: range) -> Sequence[int]:
        """This rank's samples of a step, in the order of its micro batches; in the global order without balance."""
        index, count = self.shard
        cuts = [len(samples) * part // count for part in range(count + 1)]
        if self.work is None or self.documents is None:
            return samples[cuts[index] : cuts[index + 1]]
        work = [self.work(self.documents(one)) for one in samples]
        shares: Sequence[Sequence[int]] = [range(cuts[part], cuts[part + 1]) for part in range(count)]
        if self.balances and len(samples) % count == 0:
            shares = division().dealt(work, count, self.micro_batch_size)
        self.imbalance = division().imbalance(work, shares)
        return [samples[one] for one in shares[index]]

    def state_dict(self) -> dict[str, Any]:
        """The number of global samples that the run has taken."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of global samples."""
        self.samples = int(state["samples"])
