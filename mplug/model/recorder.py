"""What the host asks of the package that replays training steps as CUDA graphs (`trainer.graphs`)."""

from typing import Any, Protocol

from mplug.model.model import Model
from mplug.registry.provided import needed
from mplug.run.run import Run


class Recorder(Protocol):
    """The methods of the class in the entry-point group 'mplug.recorders'."""

    def begin(self) -> None:
        """Called in each process before the model gets memory."""

    def refuse(self, run: Run, model: Model) -> None:
        """Raise UsageError if a part of the run's steps cannot be replayed. Called before launch and on every rank."""

    def stepper(self, default: Any) -> Any:
        """The stepper that records and replays the steps of `default` (`mplug.DefaultStepper`)."""


def recorder_of(run: Run) -> Recorder | None:
    """The installed recorder; None unless the config sets `trainer.graphs`. UsageError if none is installed."""
    if not run.config.trainer.graphs:
        return None
    found: Recorder = needed("recorders", "trainer.graphs=true", "mplug-graphs")
    return found
