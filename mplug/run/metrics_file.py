"""Read the file metrics.jsonl of a run: one JSON object per step.

A killed run can leave an incomplete last line, which a resumed run drops. An invalid line before a valid one does not
come from a run. A resumed run then refuses the file, because it must not drop data that the user may need.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mplug.errors import UsageError, brief

METRICS = "metrics.jsonl"


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Every line with the step of its record; empty if there is no file. UsageError for a damaged line."""
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(
            f"cannot read '{path}': {error.strerror}; move it to another folder to resume without it"
        ) from None
    lines, records, problem = content.split(b"\n"), list[tuple[int, str]](), ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = _step_of(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError:
            problem = problem or f"line {number} is not UTF-8"
            continue
        except (ValueError, RecursionError):
            problem = problem or f"line {number} is not the record of a step: {brief(line.decode())!r}"
            continue
        if problem:
            raise UsageError(f"'{path}' is damaged: {problem}; repair the line, or move the file to another folder")
        records.append((step, line.decode("utf-8").rstrip("\r")))
    return records


def read_records(path: Path) -> list[dict[str, Any]]:
    """The record of every step in a metrics file; empty if there is no file. UsageError for a damaged line."""
    return [json.loads(line) for _, line in read_lines(path)]


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of each number in a record; the names of nested values are joined by '/'. None is skipped."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float):
        yield name, float(value)


def _step_of(record: Any) -> int:
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError("no step")
    return step
