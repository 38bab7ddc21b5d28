"""A process that calls functions of rewards: `python -m mplug_rollouts.worker NAME...`.

It reads a JSON line per call from its input, and writes one to its first output: the rewards, or what went wrong. What
the functions print goes to the error stream.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mplug_rollouts.parent import end_with_parent

GROUP = "mplug.rewards"
"""The group of entry points with functions of rewards."""


def found(name: str) -> Callable[..., Any]:
    """The function with this name: 'module:function', 'file.py:function', or that of an entry point.

    ValueError if there is none.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon:
        entry = next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            names = ", ".join(sorted({one.name for one in entry_points(group=GROUP)})) or "none"
            raise ValueError(f"no entry point of the group '{GROUP}' has this name (there are: {names})")
        return entry.load()  # type: ignore[no-any-return]
    if module.endswith(".py"):
        path = Path(module).absolute()
        sys.path.insert(0, str(path.parent))
        module = path.stem
    value: Any = import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise ValueError(f"it is of type {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def sentence(error: BaseException) -> str:
    """The kind and the first line of an error."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def rewards_of(function: Callable[..., Any], request: dict[str, Any]) -> list[float | None]:
    """The rewards of a call; ValueError if they are not one number or None for each completion."""
    completions = request["completions"]
    values = function(prompts=request["prompts"], completions=completions, **request["columns"])
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ValueError(
            f"it returned a value of type {type(values).__name__}, not a list with a reward per completion"
        )
    values = list(values)
    if len(values) != len(completions):
        raise ValueError(f"it returned {len(values)} rewards for {len(completions)} completions")
    return [None if one is None else number(one) for one in values]


def number(value: Any) -> float:
    """A reward as a number; ValueError if it is none, or not finite."""
    try:
        found = None if isinstance(value, str | bytes) else float(value)
    except TypeError:
        found = None
    if found is None or not math.isfinite(found):
        raise ValueError(f"it returned the reward {value!r}, which is no finite number")
    return found


def main(names: list[str]) -> None:
    """Answer calls until the input ends.

    A signal that stops the run may reach this process too. It stays, because the run finishes its step.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: None)  # programs that functions start have the default again
    end_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what functions print must not be among the answers
    sys.path.insert(0, os.getcwd())
    functions, faults = {}, {}
    for name in names:
        try:
            functions[name] = found(name)
        except BaseException as error:
            faults[name] = sentence(error)
    answers.write(json.dumps({"faults": faults}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"rewards": rewards_of(functions[request["function"]], request)}
        except BaseException as error:
            answer = {"error": sentence(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
