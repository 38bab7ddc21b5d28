"""Pipeline schedules by name: the entry points of the group 'mplug.schedules'. Imports no torch.

A schedule is a pure function from a `Shape` to a `Table`. It raises ValueError for a shape that it does not serve.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from mplug.config.entry import Entry
from mplug.errors import UsageError, counted, listed, suggest
from mplug.registry.asking import asking
from mplug.registry.entry_points import BrokenPlugin, Registry, refuse_other_versions
from mplug.registry.open_lists import OpenList
from mplug_schedules.actions import Shape, Table
from mplug_schedules.proof import check

SCHEDULES = OpenList("pipeline schedule", "mplug.schedules", {})
"""The schedules of installed packages."""
GROUP = SCHEDULES.group.removeprefix("mplug.")


def find_schedule(word: str) -> Entry:
    """The entry point of the schedule that a user named, 'NAME' or 'DISTRIBUTION/NAME'; UsageError if there is none."""
    registry = Registry.of_process()
    names = registry.names(GROUP)
    if word.rpartition("/")[2] not in [name.rpartition("/")[2] for name in names]:
        raise UsageError(
            f"no pipeline schedule '{word}' is installed{suggest(word, names)} (installed: {listed(names)})"
        )
    return registry.find(GROUP, word)


def proven_table(word: str, shape: Shape) -> Table:
    """The table of a schedule for a shape, after a check that it is correct (`check`).

    Raises UsageError if the schedule does not serve the shape, or if its table has a fault: the error names the action.
    """
    return _proven(find_schedule(word), shape)


@cache
def _proven(entry: Entry, shape: Shape) -> Table:
    schedule = _load(entry)
    label = f"the pipeline schedule '{entry.name}' ({entry.origin})"
    with asking(label, entry.target):
        try:
            table = schedule(shape)
        except ValueError as error:
            raise UsageError(f"{label} does not serve {_words(shape)}: {error}") from None
    if not isinstance(table, Table):
        raise BrokenPlugin(f"{label} returns {type(table).__name__}; a schedule returns a mplug_schedules.Table")
    try:
        check(table, shape)
    except ValueError as error:
        raise UsageError(f"{label} returns a faulty table for {_words(shape)}: {error}; use another schedule") from None
    return table


def _load(entry: Entry) -> Callable[[Shape], Table]:
    refuse_other_versions(entry)
    module, _, attribute = entry.target.partition(":")
    try:
        schedule: Callable[[Shape], Table] = getattr(import_module(module), attribute)
    except Exception as error:
        raise BrokenPlugin(
            f"the pipeline schedule '{entry.name}' ({entry.origin}) cannot be imported: {error}"
        ) from error
    if not callable(schedule):
        raise BrokenPlugin(f"the pipeline schedule '{entry.name}' ({entry.origin}): '{entry.target}' is not a function")
    return schedule


def _words(shape: Shape) -> str:
    batches = f"{shape.num_micro_batches} micro {'batch' if shape.num_micro_batches == 1 else 'batches'}"
    parts = [f"{counted(shape.num_ranks, 'rank')} and {batches}"]
    named = (("chunks per rank", shape.chunks), ("group", shape.group), ("limit", shape.limit))
    return ", ".join([*parts, *(f"{name}={value:g}" for name, value in named if value is not None)])
