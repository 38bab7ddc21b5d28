"""Find the plugin that raised an unexpected exception, and describe the cause on one line.

A plugin's code runs in hooks and in the objects that hooks return (loaders, optimizers, steppers, units, suppliers).
The host does not wrap these objects, because some of them run in every layer. The traceback identifies the plugin: the
plugin failed in the innermost frame that belongs to a package of a chosen plugin.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from mplug.errors import PluginError, RunError, UsageError, listed
from mplug.registry.hooks import COMMAND, HOST, Hooks

LONGEST = 300
"""Maximum number of characters of an exception in a message."""
IN_WORKER = re.compile(r"Caught \S+ (in .+?)\.\n")
"""The start of the text that torch gives to an exception of a DataLoader's worker process, before its traceback."""
LIBRARIES = ("torch.distributed", "torch.cuda")
"""An exception raised below these modules is a failure of the environment: a dead rank, exhausted memory."""
ENVIRONMENT = {"OutOfMemoryError", "AcceleratorError", "DistError"}
"""Torch's exceptions, with their subclasses, that are always failures of the environment."""
BROKEN_LINK = re.compile(r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting")
"""The text of a RuntimeError about a broken connection. `work.wait()` raises it in its caller's frame, a plugin's."""


def cause_of(error: BaseException) -> str:
    """An exception on one line: its type and text. For an exception of a worker process, the last line of its text."""
    text = str(error).strip()
    worker = IN_WORKER.match(text)
    if worker is not None:
        return f"{text.rpartition(chr(10))[2]} ({worker[1]})"[:LONGEST]
    name = type(error).__name__
    words = " ".join(text.split())[: LONGEST - len(name)]
    return f"{name}: {words}" if words else name


def sentence_of(error: UsageError | RunError) -> UsageError | RunError:
    """The error with its own message only: torch puts the traceback of a worker process before the message."""
    text = str(error)
    if IN_WORKER.match(text) is None:
        return error
    return type(error)(text.rpartition(f"{type(error).__qualname__}: ")[2].strip())


def plugin_error(hooks: Hooks, error: BaseException, when: str, log: str) -> PluginError | None:
    """The error that names the plugin that raised `error`; `when` is 'in step 7', `log` the file with the traceback.

    None if no plugin's code raised the exception, if it is an error for the user already, or if the environment failed.
    """
    if not isinstance(error, Exception) or isinstance(error, UsageError | RunError | OSError):
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if _is_of_environment(error) or any(_module(frame).startswith(LIBRARIES) for frame in frames):
        return None
    labels = _labels(hooks)
    innermost = next((frame for frame in reversed(frames) if _module(frame).partition(".")[0] in labels), None)
    if innermost is None:
        return None
    suspects, code = _suspects(hooks, frames, labels[_module(innermost).partition(".")[0]]), innermost.f_code
    label = suspects[0] if len(suspects) == 1 else f"one of {listed(suspects)}"
    hook = _hook(hooks, frames, label) if len(suspects) == 1 else ""
    place = f"{code.co_qualname} ({Path(code.co_filename).name}:{_line(error, innermost)})"
    return PluginError(f"{label} failed {when}, in {hook}{place}: {cause_of(error)}; its traceback is in {log}")


def failed_part(hooks: Hooks, error: BaseException) -> str:
    """An exception on one line, with the code of a chosen plugin that raised it, if there is one."""
    frames, labels = [frame for frame, _ in walk_tb(error.__traceback__)], _labels(hooks)
    innermost = next((frame for frame in reversed(frames) if _module(frame).partition(".")[0] in labels), None)
    if innermost is None:
        return cause_of(error)
    suspects, code = _suspects(hooks, frames, labels[_module(innermost).partition(".")[0]]), innermost.f_code
    place = f"{code.co_qualname}, {Path(code.co_filename).name}:{_line(error, innermost)}"
    return f"{cause_of(error)} (in {listed(suspects)}: {place})"


def _is_of_environment(error: Exception) -> bool:
    """Whether memory is exhausted, a device has failed, or a connection to another rank has broken."""
    if ENVIRONMENT & {base.__name__ for base in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and BROKEN_LINK.search(str(error)) is not None


def _labels(hooks: Hooks) -> Mapping[str, Sequence[str]]:
    """The chosen plugins' labels by their top-level packages; a package may have several plugins."""
    labels: dict[str, list[str]] = {}
    for label, plugin in hooks.plugins.items():
        package = type(plugin).__module__.partition(".")[0]
        if not label.startswith((HOST, COMMAND)) and package != "mplug":
            labels.setdefault(package, []).append(label)
    return labels


def _suspects(hooks: Hooks, frames: list[FrameType], labels: Sequence[str]) -> Sequence[str]:
    """Which of a package's plugins (`labels`) the innermost frames belong to; all of them if no frame decides it."""
    if len(labels) == 1:
        return labels
    for frame in reversed(frames):
        own = [label for label in labels if hooks.plugins[label] is frame.f_locals.get("self")]
        if suspects := own or [label for label in labels if _hook(hooks, [frame], label)]:
            return suspects
    return labels


def _hook(hooks: Hooks, frames: list[FrameType], label: str) -> str:
    """The hook of the plugin that was running, as part of a message; empty outside of its hooks."""
    plugin = type(hooks.plugins[label])
    methods = {name: getattr(plugin, name, None) for name in {frame.f_code.co_name for frame in frames}}
    codes = {
        method.__code__: name
        for name, method in methods.items()
        if method is not None and hasattr(method, "mplug_impl")
    }
    name = next((codes[frame.f_code] for frame in frames if frame.f_code in codes), "")
    return f"the hook '{name}', in " if name else ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(error: BaseException, frame: FrameType) -> int:
    return next(line for other, line in walk_tb(error.__traceback__) if other is frame)
