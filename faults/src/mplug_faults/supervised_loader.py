"""Report the failures of loaders: micro batches that break the contract, too few samples, exceptions.

Each error names the plugin, the samples and the cause. A loader that breaks the contract, or raises an unforeseen
exception, has a bug (`PluginError`, exit status 1). A value that no model can take is bad data (`UsageError`, exit
status 2). A file that cannot be read is a failure of the machine (`RunError`, exit status 1).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import MicroBatch
from mplug.errors import PluginError, RunError, UsageError
from mplug.training.division import division
from mplug.training.source import Source
from mplug_faults.blame import cause_of, sentence_of
from mplug_faults.micro_batch_checks import malformed, out_of_range

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
END = object()
"""What `next` returns at the end of the micro batches: a loader may yield None by mistake."""


def fault_of(batch: MicroBatch, source: Source) -> str:
    """A sentence about how a micro batch breaks the contract of loaders; '' if it does not."""
    fault = malformed(batch, source.seq_length)
    if fault or source.plan is None or not source.plan.streams:
        return fault
    return division().malformed(batch, source.plan)


class Supervised:
    """Wraps a loader so that its failures name the plugin and the samples.

    `samples` is the number of global samples that the run has taken from the loader.
    """

    def __init__(self, loader: Loader, source: Source) -> None:
        self.loader, self.source, self.samples = loader, source, 0
        self._last: int | Tensor | None = None

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """The loader's micro batches, each checked; after the last one, it raises an error for too few samples."""
        first, self.samples = self.samples, self.samples + num_samples
        # The loader is called now: samples count as taken even if none of them is read.
        unread = self._calling_loader(lambda: iter(self.loader.take(num_samples)), first, num_samples)
        return self._checked(unread, first, num_samples)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        return self._calling_state("state_dict", self.loader.state_dict)

    def load_state_dict(self, state: dict[str, Any], samples: int = 0) -> None:
        """Continue at a saved state of the loader, which was saved after `samples` global samples."""
        self._calling_state("load_state_dict", lambda: self.loader.load_state_dict(state))
        self.samples, self._last = samples, None

    def _checked(self, unread: Iterator[MicroBatch], first: int, num_samples: int) -> Iterator[MicroBatch]:
        source, count, most = self.source, 0, -(-num_samples // self.source.shards)
        while (batch := self._calling_loader(lambda: next(unread, END), first, num_samples, count)) is not END:
            fault = fault_of(batch, source)
            count += 0 if fault else len(batch["sample_ids"])
            if count > most:
                fault = f"it yields {count} samples, and rank {source.rank} reads at most {most} of them"
            if fault:
                where = self._samples_of(first, num_samples)
                raise PluginError(f"{source.plugin} breaks the contract of loaders {where}: {fault}")
            fault = out_of_range(batch, self.loader.vocab_size)
            if fault:
                raise UsageError(
                    f"{source.plugin} yields invalid data {self._samples_of(first, num_samples)}: {fault}; "
                    f"correct the data, or prepare it again with the tokenizer of this run"
                )
            self._last = _last_of(batch["sample_ids"]) if count else None
            yield batch
        if count < num_samples // source.shards:
            raise self._ended_early(first, num_samples, count)

    def _calling_loader(self, work: Callable[[], Any], first: int, num_samples: int, count: int = 0) -> Any:
        """Call the loader by `work`; an exception then names the plugin and the samples."""
        try:
            return work()
        except (UsageError, RunError) as error:
            plain = sentence_of(error)
            if plain is error:
                raise
            raise plain from error
        except StopIteration as error:
            raise self._ended_early(first, num_samples, count) from error
        except Exception as error:
            if isinstance(error.__cause__, StopIteration):  # in a generator, where Python makes it a RuntimeError
                raise self._ended_early(first, num_samples, count) from error
            self._failed(error, f"failed {self._samples_of(first, num_samples)}")

    def _calling_state(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (UsageError, RunError):
            raise
        except Exception as error:
            self._failed(error, f"failed in {name} of the {self._data}, after {self.samples} samples")

    def _failed(self, error: Exception, what: str) -> NoReturn:
        sentence = f"{self.source.plugin} {what}: {cause_of(error)}"
        if isinstance(error, OSError):
            raise RunError(sentence) from error
        raise PluginError(f"{sentence}; its traceback is in logs/rank{self.source.rank}.log") from error

    def _ended_early(self, first: int, num_samples: int, count: int) -> PluginError:
        least = num_samples // self.source.shards
        return PluginError(
            f"{self.source.plugin} ended early {self._samples_of(first, num_samples)}: it yielded {count} of the "
            f"{least} samples that rank {self.source.rank} reads; after an epoch, a loader must begin the next one"
        )

    @property
    def _data(self) -> str:
        return f"{'training' if self.source.split == 'train' else self.source.split} data"

    def _samples_of(self, first: int, num_samples: int) -> str:
        """The samples of one call of `take`, by their numbers in the global order, and the epoch if it is stated."""
        epoch = self.loader.samples_per_epoch
        named = f" (epoch {first // epoch + 1})" if epoch is not None and epoch > 0 else ""
        after = "" if self._last is None else f", after sample {int(self._last)}"
        return f"in samples {first} to {first + num_samples - 1} of the {self._data}{named}{after}"


def _last_of(numbers: "Tensor") -> "int | Tensor":
    """The last sample's number; a tensor on a device stays there, because the host would wait for the device."""
    return int(numbers[-1]) if numbers.device.type == "cpu" else numbers[-1]
