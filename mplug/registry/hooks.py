"""The hooks of one run: check plugins against the specifications, and call them through pluggy."""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pluggy

from mplug.errors import RunError, UsageError, listed, suggest
from mplug.registry.specification import CONSTANTS, SPECIFICATIONS, hooks_answered_by

log = logging.getLogger("mplug")

HOST = "host/"
"""Prefix of the labels of the host's own observers."""
REFUSING = "run_started"
"""The observing hook in which a UsageError ends the run."""
COMMAND = "commands/"
"""Prefix of the label of the object with which a command takes part in the runs that it builds."""


def implemented(plugin: type) -> list[str]:
    """The hooks that a plugin class implements, by a method or by an attribute."""
    methods = [name for name, function in _methods(plugin) if hasattr(function, "mplug_impl")]
    return sorted([*methods, *(name for name in CONSTANTS if _is_constant(plugin, name))])


def faults(plugin: type) -> list[str]:
    """The faults of a plugin class, one message each. Pluggy alone does not report most of them."""
    messages = [
        f"'{name}' has the name of a hook and is no method; write a method with @hookimpl, or rename the attribute"
        for name in SPECIFICATIONS
        if name not in CONSTANTS and hasattr(plugin, name) and not inspect.isroutine(getattr(plugin, name))
    ]
    for name, function in _methods(plugin):
        marked = hasattr(function, "mplug_impl")
        if marked and name not in SPECIFICATIONS:
            messages.append(f"'{name}' is not a hook{suggest(name, SPECIFICATIONS)}")
        elif name in SPECIFICATIONS and not marked:
            messages.append(f"'{name}' has the name of a hook but no @hookimpl; add @hookimpl, or rename the method")
        elif marked:
            specified = list(inspect.signature(SPECIFICATIONS[name]).parameters)
            arguments = list(inspect.signature(function).parameters)[1:]
            messages += [
                f"hook '{name}' has no argument '{argument}'{suggest(argument, specified)} (it has {listed(specified)})"
                for argument in arguments
                if argument not in specified
            ]
    return messages


def _is_constant(plugin: object, name: str) -> bool:
    """Whether a plugin, or its class, answers a hook by an attribute."""
    return name in CONSTANTS and hasattr(plugin, name) and not inspect.isroutine(getattr(plugin, name))


def _methods(plugin: type) -> list[tuple[str, Callable[..., Any]]]:
    return inspect.getmembers(plugin, lambda member: inspect.isfunction(member))


def _marked() -> dict[str, Any]:
    """The specifications, marked as pluggy reads them: all hooks but those with all answers stop at the first one."""
    mark, all_answers = pluggy.HookspecMarker("mplug"), hooks_answered_by("all")
    return {name: mark(firstresult=name not in all_answers)(function) for name, function in SPECIFICATIONS.items()}


class Hooks:
    """The registered plugins of one run. Example of a call: `hooks.call.build_model(run=run)`.

    Plugins are called in the order of their labels. Pluggy calls the last registered plugin first, so plugins are
    registered in reverse order.
    """

    def __init__(self, plugins: dict[str, object]) -> None:
        self.plugins = dict(sorted(plugins.items()))
        self._manager = _Manager("mplug")
        self._manager.add_hookspecs(type("Specifications", (), _marked()))
        for label, plugin in reversed(self.plugins.items()):
            self._manager.register(plugin, label)
            for caller in self._manager.get_hookcallers(plugin) or ():
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is plugin:  # pluggy has no hook for exceptions
                        implementation.function = _with_note(implementation)  # type: ignore[misc]
        self.call = self._manager.hook
        self._reported: set[tuple[str, str]] = set()

    def implementers(self, hook: str) -> list[str]:
        """Labels of the plugins that implement a hook, in the order in which they are called."""
        found = {*self._constants(hook), *(one.plugin_name for one in self._implementations(hook))}
        return [label for label in self.plugins if label in found]

    def each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """The label and answer of every plugin that does not answer None, in the order of the calls."""
        answers = self._constants(hook)
        for implementation in reversed(self._implementations(hook)):
            answers[implementation.plugin_name] = _bound(implementation)(**arguments)
        return [(label, answers[label]) for label in self.plugins if answers.get(label) is not None]

    def layered(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """The labels and implementations of a hook, sorted by their plugins' declared `layer`, innermost first."""
        ordered = list(reversed(self._implementations(hook)))
        ordered.sort(key=lambda implementation: getattr(implementation.plugin, "layer", 0))
        return [(implementation.plugin_name, _bound(implementation)) for implementation in ordered]

    def observe(self, hook: str, **arguments: Any) -> None:
        """Call observers. The exception of a plugin is logged; the exception of a host's own observer ends the run.

        So does a UsageError of `run_started`, by which a plugin refuses the run.
        """
        for implementation in reversed(self._implementations(hook)):
            try:
                _bound(implementation)(**arguments)
            except Exception as error:
                refused = hook == REFUSING and isinstance(error, UsageError)
                if refused or implementation.plugin_name.startswith(HOST):
                    raise
                self._report_once(implementation.plugin_name, hook)
                log.exception("observer '%s' failed in %s; the run continues", implementation.plugin_name, hook)

    def _constants(self, hook: str) -> dict[str, Any]:
        """The answers that plugins state as attributes, by label."""
        return {label: getattr(one, hook) for label, one in self.plugins.items() if _is_constant(one, hook)}

    def _report_once(self, label: str, hook: str) -> None:
        if (label, hook) not in self._reported:
            self._reported.add((label, hook))
            message = f"observer '{label}' failed in {hook}; the run continues; its log has the traceback"
            print(f"mplug: {message}", file=sys.stderr)

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self.call, hook)
        return caller.get_hookimpls()

    def refuse_rivals(self) -> None:
        """Raise UsageError if several plugins implement a hook that takes one answer, or none implements a needed one.

        The host calls it after the plugins have checked the config: a plugin may know a better reason.
        """
        for hook in (*hooks_answered_by("exactly one"), *hooks_answered_by("at most one")):
            rivals = self.implementers(hook)
            if len(rivals) > 1:
                raise UsageError(
                    f"{listed(rivals)} all implement '{hook}', which takes one answer; use only one of them"
                )
        for hook in hooks_answered_by("exactly one"):
            if not self.implementers(hook):
                raise UsageError(
                    f"none of the chosen plugins ({listed(self.plugins)}) implements '{hook}'; add one that does"
                )


class _Manager(pluggy.PluginManager):
    """Skips the attributes that every object has: pluggy's search of one attribute takes 10 to 20 microseconds."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def _bound(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return implementation.function(**{name: arguments[name] for name in implementation.argnames})

    return call


def _with_note(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """Wrap an implementation to add a note with plugin and hook to an unexpected exception.

    A hook can run before the run has a log. The terminal then shows the traceback with this note as its last line.
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
