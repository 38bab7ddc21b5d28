"""What the host asks of the package that says which plugin failed."""

from typing import Any, Protocol

from mplug.contracts.loader import Loader
from mplug.errors import PluginError
from mplug.model.built import Built
from mplug.registry.hooks import Hooks
from mplug.registry.provided import provided
from mplug.run.run import Run
from mplug.training.source import Source


class Faults(Protocol):
    """The methods of the class in the entry-point group 'mplug.faults'.

    Without an installed class, an unexpected exception ends a run as it is, and nothing checks micro batches.
    """

    def plugin_error(self, hooks: Hooks, error: BaseException, when: str, log: str) -> PluginError | None:
        """The error that names the plugin that raised `error`; `when` is 'in step 7', `log` has the traceback.

        None if no plugin's code raised the exception, if it is an error for the user already, or if the environment
        failed.
        """

    def refuse_entries(self, run: Run, model: Built, of_loader: frozenset[str]) -> None:
        """Raise UsageError if no unit takes an optional entry of the loader, or a stream of the model lacks entries.

        Called with the model on the meta device, if there are such entries or streams.
        """

    def supervised(self, loader: Loader, source: Source) -> Any:
        """An object with the methods of the loader, which checks its micro batches; `loader` is its attribute.

        Its `load_state_dict(state, samples)` also takes the number of global samples of the state.
        """


def faults() -> Faults | None:
    """The installed class, or None."""
    found: Faults | None = provided("faults")
    return found
