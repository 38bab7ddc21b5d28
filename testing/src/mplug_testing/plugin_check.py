"""The quick part of a plugin's suite, run in a process of its own: `mplug plugins check`.

`python -m mplug_testing.plugin_check KIND DISTRIBUTION/NAME` prints a report as JSON.
"""

import sys
from importlib import import_module

from mplug.errors import listed
from mplug.registry.entry_points import Registry
from mplug_testing.inspection import Report, inspect_here, report_in_time
from mplug_testing.suite import PluginSuite, smoke_faults, unset_fields


def suite_of(kind: str) -> type[PluginSuite]:
    """The suite for plugins of a kind: 'kernels' -> KernelSuite."""
    defined = vars(import_module(f"mplug_testing.{kind}")).values()
    return next(one for one in defined if isinstance(one, type) and getattr(one, "kind", None) == kind)


def check_here(kind: str, word: str) -> Report:
    """The report of a plugin, made in this process, with what the quick part of its kind's suite finds wrong."""
    report = inspect_here(kind, word)
    if report.fault:
        return report
    suite = type("Check", (suite_of(kind),), {"plugin": word if _is_ambiguous(kind, word) else word.rpartition("/")[2]})
    unset = unset_fields(suite)
    if unset:
        report.note = f"imported but not run, because its Config requires {listed(unset)}"
    else:
        report.fault = "\n".join(smoke_faults(suite))
    return report


def _is_ambiguous(kind: str, word: str) -> bool:
    return word in Registry().names(kind)


if __name__ == "__main__":
    report_in_time(check_here, sys.argv[1], sys.argv[2])
