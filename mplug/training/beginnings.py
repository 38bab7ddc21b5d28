"""What the host asks of the package that serves the weights and adapters with which runs begin."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mplug.config.binding import RunConfig
from mplug.config.sources import Settings
from mplug.contracts.optimizer import Piece
from mplug.model.model import Model
from mplug.registry.beginnings import beginnings
from mplug.registry.entry_points import Registry
from mplug.run.run import Run


@dataclass(frozen=True)
class Loaded:
    """The weights with which a run has begun: where they are from (None: it has its own), and messages about them.

    `keep` copies into the run's folder what an export needs of them.
    """

    source: str | None = None
    lines: tuple[str, ...] = ()
    keep: Callable[[], None] | None = None


class Beginnings(Protocol):
    """The methods of the class in the entry-point group 'mplug.beginnings'. Their errors are UsageError and RunError.

    The host calls `settings` if settings name weights or adapters (`names_some`). Of the other methods, it calls those
    with a model if the config names weights, or if the model has adapters with a published form (`Model.adapters`).
    """

    def settings(self, registry: Registry, base: Settings, overrides: Settings) -> tuple[Settings, Settings]:
        """(base, overrides), with what the weights and adapters of a run say about its settings."""

    def about_config(self, config: RunConfig) -> list[str]:
        """Lines about settings that a run has because it begins with weights or trains adapters."""

    def is_published(self, folder: Path) -> bool:
        """Whether a folder has a model of other software that a run could begin with."""

    def source(self, run: Run) -> str:
        """The weights with which a run would begin now, as a message names them. UsageError if there are none."""

    def check(self, run: Run, model: Model, is_new: bool, is_reader: bool) -> tuple[str | None, list[str]]:
        """(`source`, lines about the weights and the adapters) of a run. UsageError if they do not fit the model.

        Called before a process starts, with the model on the meta device. A resumed run is not new: it begins with a
        checkpoint of its own. One process on each machine is the reader; the others read no files.
        """

    def load(self, run: Run, model: Model, pieces: list[Piece]) -> Loaded:
        """Fill a new run with its weights and adapters. Collective."""


def beginnings_of(run: Run, model: Model) -> Beginnings | None:
    """What serves the run's weights and adapters; None if it has neither."""
    if run.config.checkpoint.pretrained is None and model.adapters is None:
        return None
    found: Beginnings = beginnings()
    return found
