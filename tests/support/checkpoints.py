"""Runs whose checkpoints tests damage: which of a folder are valid, a run that saves by hand, and how one dies."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mplug.errors import UsageError
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug_saving.folder import complete, read_valid
from mplug_saving.names import step_of
from mplug_saving.position import Position
from mplug_testing.harness import tiny_config

SMALL = {"model.num_layers": 1, "trainer.eval_every": 0, "checkpoint.every": 1, "checkpoint.asynchronous": False}
"""A run whose every step is saved."""


def valid_in(folder: Path) -> list[Path]:
    found = []
    for path in complete(folder):
        try:
            read_valid(path)
        except UsageError:
            continue
        found.append(path)
    return found


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete(folder)]


def valid(folder: Path) -> list[int]:
    return [step_of(path) for path in valid_in(folder)]


def flip_bit(file: Path, byte: int = -1, bit: int = 0) -> None:
    """Flip a bit of a file, whose size stays."""
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


def position_of(directory: Path, keep: int, resume_from: Path | None = None) -> Position:
    """A run that can save, and has taken no step."""
    run = prepare(tiny_config({**SMALL, "trainer.steps": 9, "checkpoint.keep": keep}), directory=directory)
    position = Position(run, build(run))
    if resume_from is not None:
        position.load(position.choose(resume_from))
    return position


def save(position: Position, step: int, samples: int = 0) -> None:
    """Save a step; `samples` tells two checkpoints of it apart."""
    position.run.step, position.samples = step, samples
    position.save()


CALLS = ("mkdir", "open", "rename", "replace", "unlink", "rmdir", "fsync", "write", "lstat")
"""Functions of `os` before which a process dies; between two of them it changes nothing on the disk."""


def dies(action: Callable[[], None], at: int) -> bool:
    """Do something in a fork that dies before call number `at` of CALLS; False if it makes fewer calls."""
    child, count = os.fork(), [0]
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (9, 0), status
        return status == 9

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                os._exit(9)
            return original(*arguments, **named)

        return call

    status = 1
    try:
        for name in CALLS:
            setattr(os, name, counting(getattr(os, name)))
        action()
        status = 0
    finally:
        os._exit(status)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
