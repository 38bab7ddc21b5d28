"""Which plugin an unforeseen exception comes from, and its cause in one line.

A plugin's code runs in hooks and in the objects that hooks return (loaders, optimizers, steppers, units, suppliers).
No wrapper stands between the host and these objects, because some of them run in every layer. The traceback names
them: the innermost frame of a chosen plugin's package is where the plugin failed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from mplug.errors import PluginError, RunError, UsageError
from mplug.hooks import HOST, Hooks

LONGEST = 300
"""Characters of an exception's text that a sentence repeats."""
IN_WORKER = re.compile(r"Caught \S+ (in .+?)\.\n")
"""How torch begins the text of an exception of a DataLoader's worker process; the worker's traceback follows."""
LIBRARIES = ("torch.distributed", "torch.cuda")
"""Failures below them are the world's: another rank has died, memory is exhausted."""


def cause_of(error: BaseException) -> str:
    """An exception in one line: its type and text; of one from a worker process, the last line of its text."""
    text = str(error).strip()
    worker = IN_WORKER.match(text)
    if worker is not None:
        return f"{text.rpartition(chr(10))[2]} ({worker[1]})"[:LONGEST]
    name = type(error).__name__
    words = " ".join(text.split())[: LONGEST - len(name)]
    return f"{name}: {words}" if words else name


def sentence_of(error: UsageError | RunError) -> UsageError | RunError:
    """The same error with its own sentence alone, where torch has put a worker process's traceback before it."""
    text = str(error)
    if IN_WORKER.match(text) is None:
        return error
    return type(error)(text.rpartition(f"{type(error).__qualname__}: ")[2].strip())


def plugin_error(hooks: Hooks, error: BaseException, when: str, log: str) -> PluginError | None:
    """The sentence about a plugin that has raised `error` `when` ('in step 7'); `log` is the file with its traceback.

    None if the exception comes from no plugin's code, has a sentence already, or is the world's failure.
    """
    if not isinstance(error, Exception) or isinstance(error, UsageError | RunError | OSError):
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if type(error).__name__ == "OutOfMemoryError" or any(_module(one).startswith(LIBRARIES) for one in frames):
        return None
    labels = _labels(hooks)
    found = next((one for one in reversed(frames) if _module(one).partition(".")[0] in labels), None)
    if found is None:
        return None
    label, code = labels[_module(found).partition(".")[0]], found.f_code
    hook = _hook(hooks, frames, label)
    place = f"{code.co_qualname} ({Path(code.co_filename).name}:{_line(error, found)})"
    return PluginError(f"{label} failed {when}, in {hook}{place}: {cause_of(error)}; its traceback is in {log}")


def _labels(hooks: Hooks) -> Mapping[str, str]:
    """The chosen plugins' labels by their top-level packages."""
    packages = {type(plugin).__module__.partition(".")[0]: label for label, plugin in hooks.plugins.items()}
    return {package: label for package, label in packages.items() if not label.startswith(HOST) and package != "mplug"}


def _hook(hooks: Hooks, frames: list[FrameType], label: str) -> str:
    """The plugin's hook that was running, as part of a sentence; '' outside of its hooks."""
    plugin = type(hooks.plugins[label])
    methods = {name: getattr(plugin, name, None) for name in {frame.f_code.co_name for frame in frames}}
    codes = {one.__code__: name for name, one in methods.items() if one is not None and hasattr(one, "mplug_impl")}
    name = next((codes[frame.f_code] for frame in frames if frame.f_code in codes), "")
    return f"the hook '{name}', in " if name else ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(error: BaseException, frame: FrameType) -> int:
    return next(line for one, line in walk_tb(error.__traceback__) if one is frame)
