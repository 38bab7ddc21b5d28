"""Inspect a plugin in a separate process, so that a plugin that fails to import does no harm.

`python -m mplug.inspection show|check KIND DISTRIBUTION/NAME` prints a report as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from mplug.errors import UsageError, listed
from mplug.registry import Entry, Registry

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MARK = "mplug report: "
"""The prefix of the line of a report; it is needed because a plugin may print, too."""
TIMEOUT = 120
"""Maximum time in seconds for the import and the check of a plugin."""


@dataclass
class Report:
    """The result of importing a plugin. `fields` are (name, type, default, description)."""

    fault: str = ""
    note: str = ""
    hooks: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    fields: list[tuple[str, str, str, str]] = field(default_factory=list)


def inspect_apart(entry: Entry) -> Report:
    """The report of a plugin, made in a subprocess."""
    return _apart("show", entry)


def check_apart(entry: Entry) -> Report:
    """The report of a plugin, made in a subprocess, with the faults that the quick part of its kind's suite finds."""
    return _apart("check", entry)


def _apart(task: str, entry: Entry) -> Report:
    command = [sys.executable, "-m", "mplug.inspection", task, entry.kind, f"{entry.distribution}/{entry.name}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Report(fault=f"it was not done within {TIMEOUT} s")
    if finished.returncode != 0:
        return Report(fault=finished.stderr.strip() or f"its process ended with status {finished.returncode}")
    try:
        told = next(line for line in reversed(finished.stdout.splitlines()) if line.startswith(MARK))
        return Report(**json.loads(told.removeprefix(MARK)))
    except StopIteration:
        return Report(fault="it ends the process that imports it")


def inspect_here(kind: str, word: str) -> Report:
    """The report of a plugin, made in this process."""
    registry = Registry()
    entry = registry.find(kind, word)
    if entry.kind == "commands":
        return _inspect_command(entry)
    try:
        plugin = registry.load(entry)
    except UsageError as error:
        return Report(fault=str(error))
    from mplug.hooks import implemented

    fields = [
        (name, _type(described.annotation, described.metadata), _default(described), described.description or "")
        for name, described in plugin.Config.model_fields.items()
    ]
    presets = [str(name) for name in getattr(plugin, "presets", {})]
    return Report(hooks=implemented(plugin), presets=presets, fields=fields)


def check_here(kind: str, word: str) -> Report:
    """The report of a plugin, made in this process, with the faults that the quick part of its kind's suite finds."""
    report = inspect_here(kind, word)
    if report.fault:
        return report
    from mplug.testing import suite_of
    from mplug.testing.suite import smoke_faults, unset_fields

    suite = type("Check", (suite_of(kind),), {"plugin": word if _is_ambiguous(kind, word) else word.rpartition("/")[2]})
    unset = unset_fields(suite)
    if unset:
        report.note = f"imported, and not run: its Config's {listed(unset)} must be set"
    else:
        report.fault = "\n".join(smoke_faults(suite))
    return report


def _is_ambiguous(kind: str, word: str) -> bool:
    return word in Registry().names(kind)


def _inspect_command(entry: Entry) -> Report:
    from importlib import import_module

    import click

    module, _, attribute = entry.target.partition(":")
    try:
        command = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        return Report(f"it does not import: {error!r}")
    return Report("" if isinstance(command, click.Command) else f"'{entry.target}' is not a click command")


BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type as text, such as: int > 0 | None, 'run' | 'epoch'."""
    bounds = ",".join(
        f" {sign} {getattr(one, name)}" for one in metadata for name, sign in BOUNDS.items() if hasattr(one, name)
    )
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], inner[1:]) + bounds
    if origin in (Union, UnionType):
        return " | ".join(_type(one, metadata if one is not NoneType else ()) for one in inner)
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if annotation is NoneType:
        return "None"
    plain = isinstance(annotation, type) and not inner
    return (annotation.__name__ if plain else str(annotation).replace("typing.", "")) + bounds


def _default(described: "FieldInfo") -> str:
    """A field's default as text; empty if the field is required."""
    return "" if described.is_required() else repr(described.get_default(call_default_factory=True))


if __name__ == "__main__":
    print(
        "\n"
        + MARK
        + json.dumps(asdict({"show": inspect_here, "check": check_here}[sys.argv[1]](sys.argv[2], sys.argv[3])))
    )
