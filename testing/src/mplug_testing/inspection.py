"""Inspect a plugin in a process of its own, so that a plugin whose import fails is harmless.

`python -m mplug_testing.inspection KIND DISTRIBUTION/NAME` prints a report as JSON.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from mplug.config.entry import Entry
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MARK = "mplug report: "
"""Prefix of the line that holds the report. The plugin may print other lines."""
TIMEOUT = 120
"""Maximum time in seconds for the import and the checks of a plugin; its process then interrupts itself."""
PATIENCE = 20
"""Maximum time in seconds that an interrupted process may take to end."""
LATE = (
    f"its import and checks did not end within {TIMEOUT} s; 'mplug plugins test {{}}' has no limit, for plugins that "
    f"compile on their first use"
)


@dataclass
class Report:
    """The result of importing a plugin. `fields` are (name, type, default, description)."""

    fault: str = ""
    note: str = ""
    hooks: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    fields: list[tuple[str, str, str, str]] = field(default_factory=list)


def inspect_apart(entry: Entry) -> Report:
    """The hooks, presets and fields of a plugin, found in a subprocess."""
    return report_apart("mplug_testing.inspection", entry)


def check_apart(entry: Entry) -> Report:
    """The report of `inspect_apart`, with the faults that the quick part of the suite of its kind finds."""
    return report_apart("mplug_testing.plugin_check", entry)


def report_apart(module: str, entry: Entry) -> Report:
    """The report that a module prints about a plugin, as `python -m MODULE KIND DISTRIBUTION/NAME`."""
    kind, name = entry.kind, entry.name
    command = [sys.executable, "-m", module, kind, f"{entry.distribution}/{name}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT + PATIENCE)
    except subprocess.TimeoutExpired:
        return Report(fault=LATE.format(f"{kind}/{name}"))
    if finished.returncode != 0:
        return Report(fault=finished.stderr.strip() or f"its process ended with status {finished.returncode}")
    try:
        line = next(line for line in reversed(finished.stdout.splitlines()) if line.startswith(MARK))
        return Report(**json.loads(line.removeprefix(MARK)))
    except StopIteration:
        return Report(fault="its import ends the process")


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
    from mplug.registry.hooks import implemented

    fields = [
        (name, _type(details.annotation, details.metadata), _default(details), details.description or "")
        for name, details in plugin.Config.model_fields.items()
    ]
    presets = [str(name) for name in getattr(plugin, "presets", {})]
    return Report(hooks=implemented(plugin), presets=presets, fields=fields)


def _inspect_command(entry: Entry) -> Report:
    from importlib import import_module

    import click

    module, _, attribute = entry.target.partition(":")
    try:
        command = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        return Report(f"it cannot be imported: {error!r}")
    return Report("" if isinstance(command, click.Command) else f"'{entry.target}' is not a click command")


BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type as text, such as: int > 0 | None, 'run' | 'epoch'."""
    bounds = ",".join(
        f" {sign} {getattr(constraint, name)}"
        for constraint in metadata
        for name, sign in BOUNDS.items()
        if hasattr(constraint, name)
    )
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], inner[1:]) + bounds
    if origin in (Union, UnionType):
        return " | ".join(_type(member, metadata if member is not NoneType else ()) for member in inner)
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if annotation is NoneType:
        return "None"
    if origin in (list, tuple) and inner and inner[1:] in ((), (...,)):
        return f"list[{_type(inner[0])}]" + bounds
    plain = isinstance(annotation, type) and not inner
    return (annotation.__name__ if plain else str(annotation).replace("typing.", "")) + bounds


def _default(details: "FieldInfo") -> str:
    """A field's default as text; empty if the field is required."""
    return "" if details.is_required() else repr(details.get_default(call_default_factory=True))


def print_report(report: Report) -> None:
    """Print a report for `report_apart`."""
    print(f"\n{MARK}{json.dumps(asdict(report))}")


def report_in_time(inspect: Callable[[str, str], Report], kind: str, word: str) -> None:
    """Print the report of a function, or after `TIMEOUT` that it is late.

    The function is interrupted, not killed, so it releases its locks: the lock of an extension that torch builds would
    block every later build of it.
    """
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(TIMEOUT)
    try:
        report = inspect(kind, word)
    except KeyboardInterrupt:
        report = Report(fault=LATE.format(f"{kind}/{word.rpartition('/')[2]}"))
    signal.alarm(0)
    print_report(report)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    report_in_time(inspect_here, sys.argv[1], sys.argv[2])
