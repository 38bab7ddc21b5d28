"""The precision that a plugin defines, checked against its contract. Imports no torch."""

from typing import Any

from mplug.precisions.precision import Precision
from mplug.registry.asking import asking
from mplug.registry.entry_points import BrokenPlugin, Registry

KIND, HOOK = "precisions", "define_precision"


def defined(label: str, plugin: Any) -> Precision:
    """The precision of a plugin; BrokenPlugin if it breaks the contract of `mplug.Precision`."""
    with asking(label, HOOK):
        answer = plugin.define_precision()
    if not isinstance(answer, Precision):
        raise BrokenPlugin(f"{label} answers '{HOOK}' with {answer!r}; the answer is a mplug.Precision")
    if faults := list(answer.faults()):
        raise BrokenPlugin(f"{label} defines a precision that breaks the contract: {'; '.join(faults)}")
    return answer


def precision_among(plugins: dict[str, object]) -> Precision:
    """The precision of a run's plugins, given by their labels. Exactly one of them implements the hook."""
    ((label, plugin),) = ((label, plugin) for label, plugin in plugins.items() if hasattr(plugin, HOOK))
    return defined(label, plugin)


def precision_named(word: str) -> Precision:
    """The precision that a user's word names, with its default options. UsageError if there is none."""
    registry = Registry.of_process()
    entry = registry.find(KIND, word)
    plugin = registry.load(entry)
    with asking(entry.label, "__init__"):
        instance = plugin(plugin.Config())
    return defined(entry.label, instance)
