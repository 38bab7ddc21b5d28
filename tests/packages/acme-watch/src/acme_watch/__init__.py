"""Observers. Importing this module leaves a file behind, so that a test can tell whether it was imported."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import hookimpl

if TYPE_CHECKING:
    from mplug import Record, Run

Path("acme_watch was imported").touch()


class Watch:
    """Writes a line a call."""

    class Config(BaseModel):
        """Where to write."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        file: str = Field("watched.txt", description="the file that gets a line a call")

    def __init__(self, config: Config) -> None:
        self.file = Path(config.file)

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Everything is built."""
        self._write(f"started before step {run.step + 1}")

    @hookimpl
    def step_finished(self, run: "Run", record: "Record") -> None:
        """A step's loss is known."""
        self._write(f"step {run.step} has loss {record['loss']}")

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        """A checkpoint is there."""
        self._write(f"saved {path.name}")

    @hookimpl
    def run_finished(self) -> None:
        """It is over."""
        self._write("finished")

    def _write(self, line: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class Stumble:
    """An observer that fails at every step."""

    class Config(BaseModel):
        """Nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def step_finished(self, run: Any) -> None:
        """It looks, and falls."""
        raise ValueError(f"stumbled over step {run.step}")
