"""The hooks of one run: plugins checked against the specifications, then called through pluggy."""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pluggy

from mplug.errors import RunError, UsageError, listed, suggest
from mplug.registry.specification import SPECIFICATIONS, hooks_answered_by

log = logging.getLogger("mplug")

HOST = "host/"
"""The prefix of the labels of the host's own observers."""


def implemented(plugin: type) -> list[str]:
    """The hooks that a plugin class implements."""
    return [name for name, function in _methods(plugin) if hasattr(function, "mplug_impl")]


def faults(plugin: type) -> list[str]:
    """What is wrong with a plugin class, one sentence each: pluggy alone stays silent on most of these."""
    found = []
    for name, function in _methods(plugin):
        marked = hasattr(function, "mplug_impl")
        if marked and name not in SPECIFICATIONS:
            found.append(f"'{name}' is not a hook{suggest(name, SPECIFICATIONS)}")
        elif name in SPECIFICATIONS and not marked:
            found.append(f"'{name}' has a hook's name but no @hookimpl; mark it, or rename it")
        elif marked:
            known = list(inspect.signature(SPECIFICATIONS[name]).parameters)
            given = list(inspect.signature(function).parameters)[1:]
            found += [
                f"hook '{name}' has no argument '{argument}'{suggest(argument, known)} (it has {listed(known)})"
                for argument in given
                if argument not in known
            ]
    return found


def _methods(plugin: type) -> list[tuple[str, Callable[..., Any]]]:
    return inspect.getmembers(plugin, lambda member: inspect.isfunction(member))


class Hooks:
    """The plugins of one run, ready to be called: `hooks.call.build_model(run=run)`.

    Pluggy calls the last registered plugin first; plugins are registered in reverse, so the calls are sorted by name.
    """

    def __init__(self, plugins: dict[str, object]) -> None:
        self.plugins = dict(sorted(plugins.items()))
        self._manager = pluggy.PluginManager("mplug")
        self._manager.add_hookspecs(type("Specifications", (), dict(SPECIFICATIONS)))
        for label, plugin in reversed(self.plugins.items()):
            self._manager.register(plugin, label)
            for caller in self._manager.get_hookcallers(plugin) or ():
                for one in caller.get_hookimpls():
                    if one.plugin is plugin:
                        one.function = _noting(one)  # type: ignore[misc]  # pluggy has no hook for exceptions
        self.call = self._manager.hook
        self._told: set[tuple[str, str]] = set()
        self._refuse_rivals()

    def implementers(self, hook: str) -> list[str]:
        """Labels of the plugins that implement a hook, in the order in which they are called."""
        return [implementation.plugin_name for implementation in reversed(self._implementations(hook))]

    def each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Every plugin's label and answer, in the order of the calls, without answers that are None."""
        answers = [(one.plugin_name, _bound(one)(**arguments)) for one in reversed(self._implementations(hook))]
        return [(label, answer) for label, answer in answers if answer is not None]

    def layered(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """The labels and implementations of a hook, sorted by their plugins' declared `layer`, the innermost first."""
        called = list(reversed(self._implementations(hook)))
        called.sort(key=lambda implementation: getattr(implementation.plugin, "layer", 0))
        return [(implementation.plugin_name, _bound(implementation)) for implementation in called]

    def observe(self, hook: str, **arguments: Any) -> None:
        """Call observers. An exception of a plugin is logged and does not end the run; one of the host's own does."""
        for implementation in reversed(self._implementations(hook)):
            try:
                _bound(implementation)(**arguments)
            except Exception:
                if implementation.plugin_name.startswith(HOST):
                    raise
                self._tell_once(implementation.plugin_name, hook)
                log.exception("observer '%s' failed in %s; the run goes on", implementation.plugin_name, hook)

    def _tell_once(self, label: str, hook: str) -> None:
        if (label, hook) not in self._told:
            self._told.add((label, hook))
            print(
                f"mplug: observer '{label}' failed in {hook}; the run goes on, and its log says more", file=sys.stderr
            )

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self.call, hook)
        return caller.get_hookimpls()

    def _refuse_rivals(self) -> None:
        for hook in (*hooks_answered_by("exactly one"), *hooks_answered_by("at most one")):
            rivals = self.implementers(hook)
            if len(rivals) > 1:
                raise UsageError(f"{listed(rivals)} all answer '{hook}', which takes one answer; name only one of them")
        for hook in hooks_answered_by("exactly one"):
            if not self.implementers(hook):
                raise UsageError(f"none of the chosen plugins ({listed(self.plugins)}) implements '{hook}'")


def _bound(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return implementation.function(**{name: arguments[name] for name in implementation.argnames})

    return call


def _noting(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """The implementation, wrapped to add a note with plugin and hook to an unexpected exception.

    Hooks also run before a run has a log. Then the terminal shows the traceback, and the note is its last line.
    """
    function = implementation.function

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (UsageError, RunError, OSError):
            raise
        except Exception as error:
            error.add_note(f"raised in the hook '{function.__name__}' of {implementation.plugin_name}")
            raise

    return call
