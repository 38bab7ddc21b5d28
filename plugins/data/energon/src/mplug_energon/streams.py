"""A global order of samples that is independent of the number of data-parallel ranks, from Energon's streams.

Energon splits a data set among its ranks, and the samples of a rank depend on their number. So this plugin always
gives Energon a fixed number of ranks, called *streams*; they are not ranks of the run. Sample n of the global order is
the next sample of stream n modulo the number of streams. Every rank of the run reads the streams of its own samples.
The order is the same for every number of ranks that divides the number of streams, and any rank can continue a stream.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.energon import SavableDataLoader
from megatron.energon.errors import FatalSampleError

from mplug import Loader, MicroBatch, RunError, UsageError
from mplug_energon.sources import message_of
from mplug_energon.states import from_plain, to_plain

Collate = Callable[[list[Any], list[int]], MicroBatch]
"""(encoded samples, their numbers) -> a micro batch."""


@dataclass(frozen=True)
class Shape:
    """How the data set is split; a state can only be loaded with the same shape."""

    streams: int
    num_workers: int


class StreamLoader(Loader):
    """A loader of a rank's streams. Its state holds that of each stream; `merge_states` merges all ranks' states."""

    def __init__(
        self,
        open_stream: Callable[[int], "SavableDataLoader[Any]"],
        path: str,
        shape: Shape,
        collate: Collate,
        *,
        vocab_size: int,
        shard: tuple[int, int],
        micro_batch_size: int,
    ) -> None:
        self.open_stream, self.path, self.shape, self.collate = open_stream, path, shape, collate
        self.vocab_size, self.shard, self.micro_batch_size = vocab_size, shard, micro_batch_size
        index, count = shard
        if shape.streams % count:
            raise UsageError(
                f"data.streams={shape.streams} is not a multiple of the {count} data-parallel ranks; the streams "
                f"determine the order of samples, so set data.streams to a multiple of the data-parallel ranks of "
                f"every layout of this run"
            )
        self.samples = 0
        self._taken: Iterator[MicroBatch] = iter(())
        self._loaders = {stream: open_stream(stream) for stream in range(index, shape.streams, count)}
        self._samples: dict[int, Iterator[Any]] = {}

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches: every `count`-th of them."""
        self._read_taken()
        index, count = self.shard
        first = self.samples
        self.samples += num_samples
        self._taken = self._micro_batches([n for n in range(first, self.samples) if n % count == index])
        return self._taken

    def _micro_batches(self, numbers: list[int]) -> Iterator[MicroBatch]:
        for start in range(0, len(numbers), self.micro_batch_size):
            part = numbers[start : start + self.micro_batch_size]
            yield self.collate([self._next(number % self.shape.streams) for number in part], part)

    def _next(self, stream: int) -> Any:
        if stream not in self._samples:
            self._samples[stream] = iter(self._loaders[stream])
        try:
            return next(self._samples[stream])
        except (AssertionError, StopIteration) as error:  # from an endless data set: Energon's errors for an empty one
            raise UsageError(
                f"stream {stream} of data.streams={self.shape.streams} has no sample "
                f"({str(error).strip().rpartition(chr(10))[2]}); every stream needs at least one sample, so set a "
                f"smaller data.streams"
            ) from error
        except (UsageError, RunError):
            raise
        except FatalSampleError as error:  # Energon's error for a NameError or ImportError in an encoder
            raise RunError(
                f"a sample of the data set cannot be used: {message_of(error)}; correct the task encoder"
            ) from error
        except Exception as error:  # other errors of Energon; those of readers already name the tar
            raise UsageError(
                f"data.path '{self.path}' cannot be read: {message_of(error)}; it is damaged or has changed since it "
                f"was prepared; download it again, or run 'energon prepare' again"
            ) from error

    def _read_taken(self) -> None:
        """Read the rest of the samples taken, because they count as read."""
        for _ in self._taken:
            pass

    def state_dict(self) -> dict[str, Any]:
        """The number of samples taken, and the state of each stream of this rank."""
        self._read_taken()
        streams = {str(stream): to_plain(loader.save_state_rank()) for stream, loader in self._loaders.items()}
        return {
            "samples": self.samples,
            "num_streams": self.shape.streams,
            "num_workers": self.shape.num_workers,
            "streams": streams,
        }

    @staticmethod
    def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """One state with the streams of all ranks."""
        states = list(states)
        streams = {name: stream for state in states for name, stream in state["streams"].items()}
        return {**states[0], "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Open this rank's streams at the positions of the state; raises UsageError if Energon cannot restore them."""
        self._refuse_other(state)
        opened: dict[int, SavableDataLoader[Any]] = {}
        for stream in self._loaders:
            opened[stream] = self.open_stream(stream)
            try:
                opened[stream].restore_state_rank(from_plain(state["streams"][str(stream)]))
            except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise UsageError(
                    f"Energon cannot continue from this checkpoint ({type(error).__name__}: {error}); resume with the "
                    f"data set, the blend and the data section with which it was saved"
                ) from error
        self._taken, self._samples, self._loaders = iter(()), {}, opened
        self.samples = int(state["samples"])

    def _refuse_other(self, state: dict[str, Any]) -> None:
        if "num_streams" not in state:
            raise UsageError(
                "the data position in this checkpoint is not from data/energon; resume with the data plugin with which "
                "it was saved"
            )
        for name, own in (("streams", self.shape.streams), ("num_workers", self.shape.num_workers)):
            saved = state["num_streams" if name == "streams" else name]
            if saved != own:
                raise UsageError(
                    f"the checkpoint was saved with data.{name}={saved}, and this run has data.{name}={own}, which "
                    f"divides the data set differently; resume with data.{name}={saved}"
                )
