"""What the host asks about failures (`mplug.training.faults.Faults`)."""

from mplug.contracts.loader import Loader
from mplug.errors import PluginError
from mplug.model.built import Built
from mplug.registry.hooks import Hooks
from mplug.run.run import Run
from mplug.training.source import Source
from mplug_faults.blame import plugin_error
from mplug_faults.entries import refuse_missing_entries, refuse_unused_entries
from mplug_faults.supervised_loader import Supervised


class Faults:
    """The class of the entry-point group 'mplug.faults'."""

    def plugin_error(self, hooks: Hooks, error: BaseException, when: str, log: str) -> PluginError | None:
        """The error that names the plugin that raised `error`; None if no plugin's code did."""
        return plugin_error(hooks, error, when, log)

    def refuse_entries(self, run: Run, model: Built, of_loader: frozenset[str]) -> None:
        """Raise UsageError if no unit takes an optional entry of the loader, or a stream of the model lacks entries."""
        refuse_unused_entries(run, model, of_loader)
        refuse_missing_entries(run, model)

    def supervised(self, loader: Loader, source: Source) -> Supervised:
        """The loader, whose micro batches are checked, and whose failures name the plugin and the samples."""
        return Supervised(loader, source)
