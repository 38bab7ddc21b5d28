"""What the host asks of the package that compares a run with its machine before it starts."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mplug.config.binding import RunConfig
from mplug.config.sources import Settings
from mplug.distributed.world import World
from mplug.model.model import Model
from mplug.model.slots.offers import Unmet
from mplug.run.run import Run


class Preflight(Protocol):
    """The methods of the class in the entry-point group 'mplug.preflights'.

    The host calls them before a process starts, with the model on the meta device, and the first two in each process.
    Without an installed class, a run that does not fit its machine fails when it needs the memory, and the FLOPs of a
    step are those of a model without frozen parameters.
    """

    def within_reason(self, config: RunConfig, label: str) -> AbstractContextManager[None]:
        """A block in which the plugin `label` builds the model; UsageError for sizes that no machine can hold."""

    def passes(self, model: Model) -> Mapping[str, Any]:
        """The passes of a step of a whole model (`flops`), by the entry with the lengths of a stream's segments.

        The entry of the units of tokens is ''. Called between `Model.place` and `Model.keep_stage`.
        """

    def about_settings(self, run: Run, overrides: Settings) -> list[str]:
        """Lines about settings of the user (`overrides`) that do less than they seem to."""

    def refuse(self, run: Run, model: Model, world: World | None) -> None:
        """Raise UsageError if this machine cannot hold the least that the run needs."""

    def about_steps(self, run: Run, model: Model, world: World | None, done: int) -> list[str]:
        """Lines about the steps after the first `done` ones. Called on the process that announces the run."""

    def about_memory(self, run: Run, model: Model, world: World | None) -> list[str]:
        """Lines about the memory that the run needs; UsageError if it does not fit. The last call with the model.

        The model may get tensors without memory.
        """

    def about_unmet(self, run: Run, unmet: Sequence[Unmet]) -> Iterable[str]:
        """The lines of an error about needs that no chosen plugin meets, with the kernels to name instead."""

    def data_gap(self, run: Run, samples: int | None) -> list[str]:
        """A warning if a step takes more samples than the training data hold; None: the loader does not state them."""

    def loss_warning(self, loss: float | None, vocab_size: int) -> list[str]:
        """A warning if the last loss of a run (nats per token) is far above that of a model that knows nothing."""
