"""What the host asks of the package that saves runs in checkpoints and resumes them, and a run without this package."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from mplug.errors import RunError
from mplug.model.model import Model
from mplug.registry.provided import needed, provided
from mplug.run.claim import Claim
from mplug.run.run import Run
from mplug.training.assembly import Parts


class Checkpoint(Protocol):
    """A checkpoint from which a run may continue. Its manifest has at least the 'step'."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Its plain data."""

    def lines(self) -> list[str]:
        """Messages about newer checkpoints that are skipped."""


class Changes(Protocol):
    """What a resumed run changes compared with its checkpoint."""

    def lines(self) -> list[str]:
        """The changes as lines of a log."""


class Saver(Protocol):
    """The saves of a run, which may continue while it trains."""

    def expected_seconds(self) -> float:
        """The seconds that a save may take until the checkpoint is visible."""

    def wait(self) -> None:
        """Wait for the save in progress. Collective; raises RunError on all ranks if it failed."""

    def let_finish(self) -> None:
        """Wait for the save in progress, without an error."""

    def saved(self) -> Iterable[Path]:
        """The checkpoints that have become complete since the last call."""


class Position(Protocol):
    """The samples and tokens that a run has consumed, and its way into checkpoints."""

    parts: Parts
    samples: int
    tokens: int

    @property
    def saver(self) -> Saver:
        """The saves of the run."""

    @property
    def changes(self) -> Changes:
        """The changes of this resume."""

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """The changes of every resume, for the record of the run."""

    def choose(self, newest: Path) -> Any:
        """The `Checkpoint` from which the run continues: `newest`, or the newest valid one before it. Collective."""

    def load(self, choice: Any, allowed: tuple[str, ...] = ()) -> None:
        """Continue exactly at a chosen checkpoint; `allowed` are the fields that may change. Collective."""

    def save(self) -> None:
        """Save the current step, or begin to. Collective."""


class Saving(Protocol):
    """The methods of the class in the entry-point group 'mplug.savers'. Their errors are UsageError and RunError.

    All but the last are called before a process starts; `refuse_model` has the model on the meta device.
    """

    def lock(self, notify: Callable[[str], None]) -> AbstractContextManager[Any]:
        """What holds the lock of a run's folder in a block; `notify` receives a message if it must wait."""

    def claim_existing(self, lock: Any, directory: Path | None, name: str | None) -> Claim | None:
        """Take the lock of the run to continue, or of an existing run with the name of the new one. None if neither.

        UsageError if another process holds it.
        """

    def claim_new(self, lock: Any, run: Run, name: str | None) -> Claim:
        """Take the lock of a new run's folder. Without a name of the user, it may change `run.directory`."""

    def newest(self, directory: Path, restarted: bool) -> Path | None:
        """The newest checkpoint of a run; UsageError if it has none. None if it has none and is `restarted`."""

    def readable(self, path: Path | None) -> Checkpoint | None:
        """The newest checkpoint with a valid manifest beside `path`; None of None."""

    def readable_after(self, error: RunError, run: Run, path: Path | None) -> Checkpoint | None:
        """The checkpoint from which a run restarts after `error`. Raises an error if it cannot restart."""

    def saved_since(self, run: Run, before: Any) -> int:
        """The step of the newest checkpoint; 0 if it is the `before`, or if there is none."""

    def changes(self, run: Run, readable: Any, allowed: tuple[str, ...]) -> Changes:
        """The changes since a `Checkpoint` (none of None). UsageError for a change that the user must allow."""

    def refuse_model(self, run: Run, model: Model, readable: Any, changes: Any) -> None:
        """Raise UsageError if a checkpoint cannot hold the run, or if the model forbids one of the changes."""

    def position(self, run: Run, parts: Parts) -> Position:
        """The position of a run at its start. Collective."""


def position_of(run: Run, parts: Parts) -> Position:
    """The position of a run at its start; one that is never saved if no package saves runs."""
    saving: Saving | None = provided("savers")
    return Unsaved(parts) if saving is None else saving.position(run, parts)


class Unsaved:
    """The position of a run that saves nothing, and its saver."""

    samples = tokens = 0
    history: Sequence[Mapping[str, Any]] = ()

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @property
    def saver(self) -> Saver:
        """Itself."""
        return self

    @property
    def changes(self) -> Changes:
        """None: the run is new."""
        return self

    def lines(self) -> list[str]:
        """No change."""
        return []

    def choose(self, newest: Path) -> Any:
        """UsageError: a run that saves nothing cannot be resumed."""
        needed("savers", "--resume", "mplug-saving")

    def load(self, choice: Any, allowed: tuple[str, ...] = ()) -> None:
        """As `choose`."""
        needed("savers", "--resume", "mplug-saving")

    def save(self) -> None:
        """Save nothing; `mplug train` says so when the run starts."""

    def expected_seconds(self) -> float:
        """0."""
        return 0.0

    def wait(self) -> None:
        """Nothing is in progress."""

    def let_finish(self) -> None:
        """Nothing is in progress."""

    def saved(self) -> Iterable[Path]:
        """No checkpoint."""
        return ()
