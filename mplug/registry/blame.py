"""Which plugin an unforeseen exception comes from, and its cause in one line.

A plugin's code runs in hooks and in the objects that hooks return (loaders, optimizers, steppers, units, suppliers).
No wrapper stands between the host and these objects, because some of them run in every layer. The traceback names
them: the innermost frame of a chosen plugin's package is where the plugin failed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from mplug.errors import PluginError, RunError, UsageError, listed
from mplug.registry.hooks import HOST, Hooks

LONGEST = 300
"""Characters of an exception's text that a sentence repeats."""
IN_WORKER = re.compile(r"Caught \S+ (in .+?)\.\n")
"""How torch begins the text of an exception of a DataLoader's worker process; the worker's traceback follows."""
LIBRARIES = ("torch.distributed", "torch.cuda")
"""Failures below them are the world's: another rank has died, memory is exhausted."""
WORLD = {"OutOfMemoryError", "AcceleratorError", "DistError"}
"""Classes of torch's exceptions, with their subclasses, that are the world's wherever they are raised."""
BROKEN_LINK = re.compile(r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting")
"""What a RuntimeError of a broken connection says: `work.wait()` raises it in the frame of its caller, a plugin."""


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
    if _is_of_the_world(error) or any(_module(one).startswith(LIBRARIES) for one in frames):
        return None
    labels = _labels(hooks)
    found = next((one for one in reversed(frames) if _module(one).partition(".")[0] in labels), None)
    if found is None:
        return None
    suspects, code = _suspects(hooks, frames, labels[_module(found).partition(".")[0]]), found.f_code
    label = suspects[0] if len(suspects) == 1 else f"one of {listed(suspects)}"
    hook = _hook(hooks, frames, label) if len(suspects) == 1 else ""
    place = f"{code.co_qualname} ({Path(code.co_filename).name}:{_line(error, found)})"
    return PluginError(f"{label} failed {when}, in {hook}{place}: {cause_of(error)}; its traceback is in {log}")


def _is_of_the_world(error: Exception) -> bool:
    """Whether memory is exhausted, a device has failed, or a connection to another rank has broken."""
    if WORLD & {one.__name__ for one in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and BROKEN_LINK.search(str(error)) is not None


def _labels(hooks: Hooks) -> Mapping[str, Sequence[str]]:
    """The chosen plugins' labels by their top-level packages; a package may have several plugins."""
    labels: dict[str, list[str]] = {}
    for label, plugin in hooks.plugins.items():
        package = type(plugin).__module__.partition(".")[0]
        if not label.startswith(HOST) and package != "mplug":
            labels.setdefault(package, []).append(label)
    return labels


def _suspects(hooks: Hooks, frames: list[FrameType], labels: Sequence[str]) -> Sequence[str]:
    """The plugin of a package that the innermost frames belong to; all its plugins where no frame tells them apart."""
    if len(labels) == 1:
        return labels
    for frame in reversed(frames):
        own = [label for label in labels if hooks.plugins[label] is frame.f_locals.get("self")]
        if found := own or [label for label in labels if _hook(hooks, [frame], label)]:
            return found
    return labels


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
