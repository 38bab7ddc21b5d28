"""Watches the hooks of one plugin in a run, before and after each call."""

import copy
import inspect
import os
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.registry.hooks import implemented

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig


@dataclass
class Watch:
    """The effects of the hooks of the plugin `label` in a run, as sentences 'hook does what', each at most once.

    `calls` are (hook, step of the record that it receives). `written` are the files that its hooks write; `audit` must
    be called to fill it. `after` is called with the hook and the step after each call of a hook.
    """

    label: str
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)
    after: Callable[[str, int | None], None] = lambda *_: None
    _inside: bool = False

    def over(self, config: "RunConfig") -> "RunConfig":
        """The config with the plugin's class replaced by a subclass whose hooks are watched."""
        chosen = [
            replace(plugin, plugin=self._watched(plugin.plugin)) if plugin.label == self.label else plugin
            for plugin in config.chosen
        ]
        return replace(config, chosen=tuple(chosen))

    def _watched(self, plugin: type[Any]) -> type[Any]:
        hooks = {name: self._watched_hook(name, getattr(plugin, name)) for name in implemented(plugin)}
        return type(plugin.__name__, (plugin,), {**hooks, "__module__": plugin.__module__})  # errors name the plugin

    def _watched_hook(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            record = signature.bind(*args, **kwargs).arguments.get("record")
            self.calls.append((hook, record["step"] if record else None))
            given, states = copy.deepcopy(record), _random_states()
            self._inside = True
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._note(self.raised, f"'{hook}' raises {type(error).__name__}: {error}")
                raise
            finally:
                self._inside = False
                self._compare(hook, given, record, states)
                self.after(*self.calls[-1])

        return watched

    def _compare(self, hook: str, given: Any, record: Any, states: dict[str, bytes]) -> None:
        if record != given:
            fields = [name for name in {**given, **record} if given.get(name) != record.get(name)]
            self._note(self.changed, f"'{hook}' changes the record's '{min(fields)}'")
        for library, state in _random_states().items():
            if state != states[library]:
                self._note(self.drawn, f"'{hook}' changes the state of {library}'s global random numbers")

    @staticmethod
    def _note(sentences: list[str], sentence: str) -> None:
        if sentence not in sentences:
            sentences.append(sentence)

    def audit(self) -> None:
        """Record the files that the hooks write, for the rest of this process: an audit hook cannot be removed."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._inside or event not in ("open", "os.rename"):
            return
        if event == "os.rename":
            target = arguments[1]
        else:
            target, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR):
                return
        if isinstance(target, str | bytes | os.PathLike):
            path = Path(os.path.abspath(os.fsdecode(target)))
            if "__pycache__" not in path.parts and not path.is_relative_to("/dev"):
                self.written.add(path)


def _random_states() -> dict[str, bytes]:
    """The state of each library's global random generators."""
    import numpy
    import torch

    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": pickle.dumps(numpy.random.get_state()),
        "Python": pickle.dumps(random.getstate()),
    }
    if torch.cuda.is_available():
        states["CUDA"] = b"".join(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
    return states
