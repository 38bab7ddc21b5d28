"""Looking at a plugin in a process of its own, so that one that does not import disturbs nothing.

Run as `python -m mplug.inspection KIND DISTRIBUTION/NAME`, it prints a report as JSON.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from mplug.errors import UsageError
from mplug.registry import Entry, Registry

TIMEOUT = 120
"""Seconds that a plugin may take to import."""


@dataclass
class Report:
    """What importing a plugin showed. `fields` are (name, type, default, description)."""

    fault: str = ""
    hooks: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    fields: list[tuple[str, str, str, str]] = field(default_factory=list)


def inspect_apart(entry: Entry) -> Report:
    """The report of a plugin, made in a subprocess."""
    command = [sys.executable, "-m", "mplug.inspection", entry.kind, f"{entry.distribution}/{entry.name}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Report(fault=f"it did not import within {TIMEOUT} s")
    if finished.returncode != 0:
        return Report(fault=finished.stderr.strip() or f"its process ended with status {finished.returncode}")
    try:
        return Report(**json.loads(finished.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
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
        (name, _type(described.annotation), str(described.get_default()), described.description or "")
        for name, described in plugin.Config.model_fields.items()
    ]
    silent = "" if entry.speaks else f"{entry.distribution} does not say which mplug it speaks (add 'mplug>=0.1,<0.2')"
    return Report(silent, implemented(plugin), [str(name) for name in getattr(plugin, "presets", {})], fields)


def _inspect_command(entry: Entry) -> Report:
    from importlib import import_module

    import click

    module, _, attribute = entry.target.partition(":")
    try:
        command = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        return Report(f"it does not import: {error!r}")
    return Report("" if isinstance(command, click.Command) else f"'{entry.target}' is not a click command")


def _type(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


if __name__ == "__main__":
    print(json.dumps(asdict(inspect_here(sys.argv[1], sys.argv[2]))))
