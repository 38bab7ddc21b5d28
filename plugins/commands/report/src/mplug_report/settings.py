"""The settings of several runs, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mplug.commands import read_file

FACTS = ("mplug", "torch", "device", "world_size", "parameters")
"""Fields of record.json that the table shows before the settings."""
UNSET = "–"


def settings_of(directories: Sequence[Path]) -> dict[str, list[str]]:
    """By field, the value of each run as text; `UNSET` if the run does not have the field."""
    runs = [_settings(directory) for directory in directories]
    names = sorted({name for run in runs for name in run}, key=lambda name: (name not in FACTS, name))
    return {name: [run.get(name, UNSET) for run in runs] for name in names}


def differing(settings: dict[str, list[str]]) -> dict[str, list[str]]:
    """The fields whose values are not the same in all runs."""
    return {name: values for name, values in settings.items() if len(set(values)) > 1}


def _settings(directory: Path) -> dict[str, str]:
    record = _record(directory / "record.json")
    facts = {name: _text(record[name]) for name in FACTS if name in record}
    config = read_file(directory / "config.yaml")
    return facts | {".".join(map(str, key)): _text(setting.value) for key, setting in config.items()}


def _record(path: Path) -> dict[str, Any]:
    """The record of a run; empty if the run has none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
