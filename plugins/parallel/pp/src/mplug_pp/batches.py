"""The micro batches of a step: each is read when an action needs it, and dropped after its last action."""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import length_hint

from mplug import MicroBatch, RankBatch, RunError
from mplug_schedules import Action

Entries = Callable[[RankBatch], MicroBatch]


class Batches:
    """The micro batches of a step, or of a part of an evaluation.

    `entries` returns what this rank's units receive of a micro batch.
    `number` is the number of micro batches. An iterator that does not know it is read as a whole; with `open_end`, it
    is read until it ends, and `number` is 0.
    """

    def __init__(self, micro_batches: Iterable[RankBatch], entries: Entries, open_end: bool = False) -> None:
        self.number = 0 if open_end else length_hint(micro_batches)
        if not self.number and not open_end:
            micro_batches = list(micro_batches)
            self.number = len(micro_batches)
        self.ended = False
        self._unread, self._entries, self._read = iter(micro_batches), entries, 0
        self._held: dict[int, MicroBatch] = {}
        self._uses = Counter[int]()

    def expect(self, row: Iterable[Action]) -> None:
        """Count the actions of each micro batch."""
        self._uses = Counter(action.micro_batch for action in row)

    def __getitem__(self, number: int) -> MicroBatch:
        """The entries of a micro batch; RunError if the loader has fewer than it promised."""
        if not self.has(number):
            raise RunError(
                f"the data loader ended after {self._read} of the {self.number} micro batches of a step; every micro "
                f"batch must have trainer.micro_batch_size samples"
            )
        return self._held[number]

    def has(self, number: int) -> bool:
        """Whether there is a micro batch with this number; reads up to it."""
        while self._read <= number and not self.ended:
            batch = next(self._unread, None)
            if batch is None:
                self.ended = True
            else:
                self._held[self._read] = self._entries(batch)
                self._read += 1
        return number < self._read

    def used(self, number: int) -> None:
        """Count an action of a micro batch, and drop it after the last one."""
        self._uses[number] -= 1
        if not self._uses[number]:
            self._held.pop(number, None)

    def finish(self) -> None:
        """Raise RunError if the loader has more micro batches than it promised."""
        if next(self._unread, None) is not None:
            raise RunError(
                f"the data loader has more than the {self.number} micro batches that the step needs; every micro batch "
                f"must have trainer.micro_batch_size samples"
            )
