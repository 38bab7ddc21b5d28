"""What the host asks of the package by which one rank reads the samples of several (`parallel.read_once`)."""

from collections.abc import Callable
from typing import Protocol

from mplug.contracts.loader import Loader
from mplug.registry.provided import needed
from mplug.run.run import Run


class LoaderSharing(Protocol):
    """The methods of the class in the entry-point group 'mplug.sharings'."""

    def loader(self, run: Run, build: Callable[[], Loader]) -> Loader:
        """A loader whose samples, state and failures are those of the loader that `build` returns, on every rank.

        Only the first of the ranks that compute with the same samples calls `build`. Collective.
        """


def shared_loader(run: Run, build: Callable[[], Loader]) -> Loader:
    """The loader that `build` returns; with `parallel.read_once`, one that reads on one rank for several. Collective.

    UsageError if no installed package shares loaders.
    """
    if not run.config.parallel.read_once:
        return build()
    sharing: LoaderSharing = needed("sharings", "parallel.read_once=true", "mplug-streams")
    return sharing.loader(run, build)
