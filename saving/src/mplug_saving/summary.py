"""The summary of a run, from the files in its folder: its state, its last figures and its layout. Imports no torch."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from mplug.run.folder import BEGAN, ENDED
from mplug.run.metrics_file import METRICS
from mplug_saving.lock import is_held

SPEED_STEPS = 50
"""Number of last steps whose median is the speed of a run."""
LOG_BLOCK = 1 << 16
"""Bytes of a log that are read at once, from its end."""
State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True)
class RunSummary:
    """What the folder of a run says about it. A value is None if no file has it yet.

    The state is 'running' while a process holds the lock of the folder. It is 'done' after the last step and 'stopped'
    after an earlier one, if the log of rank 0 says that the process ended without an error. Any other run has 'failed':
    it raised an error, or was killed.

    `started` is the time of the last start, in ISO format. `tokens_per_s` is the median of the last `SPEED_STEPS`
    steps. `val_loss` is the last one. `problem` says which file could not be read.
    """

    name: str
    state: State
    step: int
    steps: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    tokens: int | None
    started: str | None
    layout: str | None
    model: str | None
    preset: str | None
    parameters: int | None
    problem: str = ""


def summary_of(directory: Path) -> RunSummary:
    """The summary of the run in this folder."""
    problems = list[str]()
    config = _mapping(directory / "config.yaml", problems)
    record = _mapping(directory / "record.json", problems)
    last, val_loss, speed = _figures(directory / METRICS, problems)
    steps, step = _inside(config, "trainer", "steps"), last.get("step", 0)
    return RunSummary(
        name=directory.name,
        state=_state(directory, steps is not None and step >= steps),
        step=step,
        steps=steps,
        loss=last.get("loss"),
        val_loss=val_loss,
        tokens_per_s=speed,
        tokens=last.get("tokens"),
        started=record.get("started") or _time_of(directory / "config.yaml"),
        layout=record.get("layout") or _inside(config, "parallel", "layout") or None,
        model=_inside(config, "model", "name"),
        preset=record.get("preset"),
        parameters=record.get("parameters"),
        problem="; ".join(problems),
    )


def _state(directory: Path, all_steps: bool) -> State:
    if is_held(directory):
        return "running"
    if not _ended(directory / "logs" / "rank0.log"):
        return "failed"
    return "done" if all_steps else "stopped"


def _ended(log: Path) -> bool:
    """Whether the last process that wrote the log ended without an error. The log is read from its end."""
    marks = {f" INFO {word} ".encode(): word == ENDED for word in (BEGAN, ENDED)}
    rest = b""
    try:
        with log.open("rb") as file:
            position = file.seek(0, 2)
            while position > 0:
                start = max(position - LOG_BLOCK, 0)
                file.seek(start)
                lines = (file.read(position - start) + rest).split(b"\n")
                for line in reversed(lines[1:] if start else lines):
                    for mark, ended in marks.items():
                        if mark in line[:48]:  # behind the time
                            return ended
                rest, position = lines[0], start
    except FileNotFoundError:
        pass  # the run has not begun
    return False


def _figures(metrics: Path, problems: list[str]) -> tuple[dict[str, Any], float | None, float | None]:
    """(the last record, the last validation loss, the speed). A run that is being written may lack its last line."""
    try:
        content = metrics.read_bytes()
    except FileNotFoundError:
        return {}, None, None
    content = content[: content.rfind(b"\n") + 1]
    try:
        records = [json.loads(line) for line in content.splitlines()[-SPEED_STEPS:]]
        evaluated = content.rfind(b'"val_loss"')
        start = content.rfind(b"\n", 0, max(evaluated, 0)) + 1
        val_loss = None
        if evaluated >= 0:
            val_loss = json.loads(content[start : content.index(b"\n", evaluated)])["val_loss"]
        if not records:
            return {}, None, None
        return dict(records[-1]), val_loss, median(record["tokens_per_s"] for record in records)
    except (ValueError, KeyError, TypeError):
        problems.append(f"'{metrics}' is damaged")
        return {}, None, None


def _mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; empty if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"'{path}' is damaged")
        return {}
    return found


def _inside(config: dict[str, Any], section: str, name: str) -> Any:
    found = config.get(section)
    return found.get(name) if isinstance(found, dict) else None


def _time_of(path: Path) -> str | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).astimezone().isoformat(timespec="seconds")
    except FileNotFoundError:
        return None
