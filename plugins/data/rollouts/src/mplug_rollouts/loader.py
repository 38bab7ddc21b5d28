"""The loader of completions: a queue that a source fills, and the samples that steps take from it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from mplug import Loader, MicroBatch, RunError
from mplug_rollouts.groups import Item

if TYPE_CHECKING:
    from mplug_rollouts.rescoring import Rescoring

Pack = Callable[[Sequence[Sequence[Item]], int], dict[str, Tensor]]
"""(completions of each sample, the number of the first sample) -> their micro batch."""


class Source(Protocol):
    """Supplies completions, the same on every rank."""

    fingerprint: str
    num_prompts: int

    def next(self, first: int, samples: int) -> tuple[list[Item], int]:
        """The next completions, of prompts from number `first` on, and how many prompts these are. Collective.

        `samples` are those that the step still needs.
        """


class RolloutLoader(Loader):
    """Takes samples of K completions (`per_sample`) in order from a queue; the source fills it before a step begins.

    The state is the number of prompts and of samples so far, and the completions that no step has taken yet.
    """

    def __init__(
        self,
        source: Source,
        pack: Pack,
        vocab_size: int,
        per_sample: int,
        shard: tuple[int, int],
        micro_batch_size: int,
        masks_truncated: bool,
        rescoring: "Callable[[], Rescoring] | None" = None,
    ) -> None:
        """`rescoring` returns what scores the completions of each rollout anew; it is called when the first one is."""
        self.masks_truncated, self.rescoring = masks_truncated, rescoring
        self.source, self.pack, self.vocab_size, self.per_sample = source, pack, vocab_size, per_sample
        self.shard, self.micro_batch_size, self.fingerprint = shard, micro_batch_size, source.fingerprint
        self.prompts = self.samples = 0
        self._queue: list[Item] = []

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next samples; the completions are sampled here, before the step begins."""
        number = num_samples * self.per_sample
        while len(self._queue) < number:
            missing = -(-(number - len(self._queue)) // self.per_sample)
            items, num_prompts = self.source.next(self.prompts, missing)
            self._queue += items if self.rescoring is None else self._rescored(self.rescoring(), items, num_samples)
            self.prompts += num_prompts
        taken, self._queue = self._queue[:number], self._queue[number:]
        if self.masks_truncated and all(item.truncated for item in taken):
            raise RunError(
                f"data.max_tokens has cut off all {number} completions of a step, and data.mask_truncated leaves them "
                f"no target; set a larger data.max_tokens, or data.mask_truncated=false"
            )
        first, self.samples = self.samples, self.samples + num_samples
        return self._batches(taken, self._own(num_samples), first)

    def _rescored(self, rescoring: "Rescoring", items: Sequence[Item], num_samples: int) -> list[Item]:
        """The completions of a rollout that serves whole steps, scored in the micro batches of these."""
        own = self._own(num_samples)
        first = self.samples + len(self._queue) // self.per_sample
        return rescoring.of(
            items, num_samples * self.per_sample, first, lambda of_step, begin: [*self._batches(of_step, own, begin)]
        )

    def _own(self, num_samples: int) -> range:
        """The samples of a step that this rank computes."""
        index, count = self.shard
        return range(num_samples * index // count, num_samples * (index + 1) // count)

    def _batches(self, items: Sequence[Item], own: range, first: int) -> Iterator[MicroBatch]:
        """The micro batches of the samples `own` of a step, whose first sample has the number `first`."""
        for begin in range(own.start, own.stop, self.micro_batch_size):
            numbers = range(begin, min(begin + self.micro_batch_size, own.stop))
            samples = [items[one * self.per_sample : (one + 1) * self.per_sample] for one in numbers]
            yield self.pack(samples, first + begin)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what is left of the last rollout."""
        queue = [item.as_plain() for item in self._queue]
        return {"prompts": self.prompts, "samples": self.samples, "completions": queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the completions that were left."""
        self.prompts, self.samples = int(state["prompts"]), int(state["samples"])
        self._queue = [Item.of_plain(value) for value in state["completions"]]


class HeldOutLoader(Loader):
    """Validation: each prompt in order has one completion of the likeliest tokens, whose advantage is its reward.

    `complete` maps the numbers of this rank's prompts to their completions. It is collective, and is called when the
    first micro batch is read: the model then has the weights that are evaluated.
    """

    def __init__(
        self,
        complete: Callable[[Sequence[int]], list[Item]],
        pack: Pack,
        vocab_size: int,
        per_sample: int,
        shard: tuple[int, int],
        micro_batch_size: int,
        num_prompts: int,
    ) -> None:
        self.complete, self.pack, self.vocab_size, self.per_sample = complete, pack, vocab_size, per_sample
        self.shard, self.micro_batch_size = shard, micro_batch_size
        self.num_prompts, self.samples = num_prompts, 0
        self.samples_per_epoch = -(-num_prompts // per_sample)

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next samples."""
        first, self.samples = self.samples, self.samples + num_samples
        index, count = self.shard
        own = range(first + num_samples * index // count, first + num_samples * (index + 1) // count)
        return self._batches(own)

    def _batches(self, own: range) -> Iterator[MicroBatch]:
        width = self.per_sample
        prompts = [one % self.num_prompts for one in range(own.start * width, own.stop * width)]
        items = self.complete(prompts)
        for begin in range(0, len(own), self.micro_batch_size):
            numbers = range(begin, min(begin + self.micro_batch_size, len(own)))
            yield self.pack([items[one * width : (one + 1) * width] for one in numbers], own.start + begin)

    def state_dict(self) -> dict[str, Any]:
        """The number of samples so far."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of samples."""
        self.samples = int(state["samples"])
