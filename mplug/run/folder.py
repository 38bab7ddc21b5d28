"""The folder of a run: its name, its config file and its log files."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path

import yaml

from mplug.config.binding import RunConfig
from mplug.errors import UsageError, listed
from mplug.run.launching import launched
from mplug.run.run import Run
from mplug.system.files import write_whole

RUNS = Path("runs")
BEGAN, ENDED = "began as rank", "the run ended"
"""The first words of the lines in a rank's log with which a process begins, and ends without an error."""


def new_directory(config: RunConfig, name: str | None, check: bool = True) -> Path:
    """The path of a new run's folder, which the function does not create. UsageError if a run of this name exists."""
    if name is not None and (not name or name.startswith(".") or Path(name).name != name):
        raise UsageError(
            f"--name '{name}' cannot be the name of a folder; use a name without '/' that does not start with '.'"
        )
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = RUNS / (name or f"{config.settings['model', 'name'].value.rpartition('/')[2]}-{stamp}")
    if check and (directory / "config.yaml").exists():
        raise UsageError(f"the run '{directory}' already exists; continue it with --resume, or use another --name")
    if check and _lacks_config(directory):
        raise UsageError(f"{_damage(directory)}, or use another --name")
    return directory


def find_directory(name: str | None) -> Path:
    """The folder of the run `name`, or of the newest run if `name` is None. UsageError if there is none."""
    runs = all_directories()
    if name is None:
        if not runs:
            damaged = [path for path in sorted(RUNS.glob("*")) if _lacks_config(path)]
            remedy = _damage(damaged[0]) if damaged else "start one with 'mplug train'"
            raise UsageError(f"there is no run in '{RUNS}'; {remedy}")
        return runs[0]
    directory = RUNS / name
    if _lacks_config(directory):
        raise UsageError(_damage(directory))
    if not (directory / "config.yaml").is_file():
        raise UsageError(
            f"there is no run '{name}' in '{RUNS}' (newest runs: {listed(path.name for path in runs[:5])})"
        )
    return directory


def all_directories() -> list[Path]:
    """The folders of all runs, the newest first."""
    files = sorted(RUNS.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in files]


def directory_at(word: str) -> Path:
    """The folder of the run with this name, or of the run at this path. UsageError if there is none."""
    path = Path(word).expanduser()
    if len(path.parts) < 2:
        return find_directory(word)
    if not (path / "config.yaml").is_file():
        raise UsageError(f"there is no run in the folder '{word}', because it has no config.yaml; use another folder")
    return path


def _lacks_config(directory: Path) -> bool:
    """Whether a folder has the files of a run that has trained, but no config.yaml."""
    trained = (directory / "checkpoints").is_dir() or (directory / "metrics.jsonl").is_file()
    return trained and not (directory / "config.yaml").exists()


def _damage(directory: Path) -> str:
    return f"the run '{directory}' has lost its file config.yaml; restore the file, or move the folder away"


def make_directory(run: Run) -> None:
    """Create the run's folder. One process of each folder also saves the resolved config."""
    assert run.directory is not None
    (run.directory / "logs").mkdir(parents=True, exist_ok=True)
    world = launched()
    if run.rank != 0 and (run.sees_first_folder or world is None or world.local_rank != 0):
        return
    text = yaml.safe_dump(run.config.resolved(), sort_keys=False)
    write_whole(
        run.directory / "config.yaml", f"# The resolved config of this run. To continue the run, use --resume.\n{text}"
    )


@contextmanager
def logging_to(run: Run) -> Iterator[None]:
    """Write the log messages of the block to this rank's log file."""
    assert run.directory is not None
    logger = logging.getLogger("mplug")
    level, handler = logger.level, _LogFile(run.directory / "logs" / f"rank{run.rank}.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


class _LogFile(logging.FileHandler):
    """A log file that is created with its first line. A write error ends the run; logging would print a traceback."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise
