"""From a run's metrics.jsonl to its totals."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug import Record, UsageError


@dataclass(frozen=True)
class Tally:
    """The totals of a run."""

    name: str
    steps: int
    tokens: int
    hours: float


def tally_of(directory: Path) -> Tally:
    """The totals of a run's directory; UsageError where a line of its metrics cannot be read."""
    steps, tokens, seconds = 0, 0, 0.0
    for record in records(directory / "metrics.jsonl"):
        steps += 1
        seconds += (record["tokens"] - tokens) / record["tokens_per_s"]
        tokens = record["tokens"]  # of the run so far
    return Tally(directory.name, steps, tokens, seconds / 3600)


def records(path: Path) -> list[Record]:
    """The lines of a metrics.jsonl; an unfinished last one, which a killed run leaves, is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return [_record(line, f"{path}:{number}") for number, line in enumerate(complete, start=1)]


def _record(line: str, where: str) -> Record:
    try:
        record: Any = json.loads(line)
        sound = record["tokens"] >= 0 and record["tokens_per_s"] > 0
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UsageError(f"{where} is not a step's line with its tokens and tokens_per_s; remove the line, or the run")
    return record
