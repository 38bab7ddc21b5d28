"""Write a run whose only checkpoint has the weights, and if possible the optimizer states, of a foreign checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.errors import RunError, UsageError, printable
from mplug.model.model import Model
from mplug.precisions.dtypes import FORMATS
from mplug.run.folder import make_directory
from mplug.run.record import provenance
from mplug.run.run import Run
from mplug.system.files import sync_path, write_whole
from mplug_checkpoint.states import States
from mplug_pretrained.copies import differing_copy
from mplug_pretrained.foreign import WEIGHT, Shape
from mplug_pretrained.foreign_match import Match
from mplug_pretrained.safetensors_file import write_safetensors
from mplug_pretrained.transfer import fill_ours
from mplug_saving.manifest import TensorTable, encode, name_in_file
from mplug_saving.names import MANIFEST, file_of, path_of
from mplug_saving.storage import crc32


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new checkpoint: whose it is, what it is of this parameter, and its value if it is a number."""

    parameter: str
    state: str
    dtype: str
    shape: Shape
    value: float | None = None

    @property
    def key(self) -> str:
        """Its name in the checkpoint."""
        return f"{self.parameter}/{self.state}"

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return prod(self.shape) * FORMATS[self.dtype].bytes


def contents(run: Run, model: Model, states: States) -> list[NewTensor]:
    """The tensors of the new checkpoint, parameter by parameter."""
    found = []
    for name, placement in model.placements.items():
        found.append(NewTensor(name, WEIGHT, run.precision.masters, placement.shape))
        for state, saved in states.of.get(name, {}).items():
            found.append(
                NewTensor(name, state, saved.dtype, placement.shape if saved.value is None else (), saved.value)
            )
    for name, buffer in model.states().items():
        if not model.buffer_placements[name].parameter.over:
            dtype = str(buffer.dtype).removeprefix("torch.")
            found.append(NewTensor(name, "buffer", dtype, model.buffer_placements[name].shape))
    return found


def write_import(
    run: Run, model: Model, found: Match, states: States, form: str, advance: Callable[[int], None]
) -> Path:
    """Write the folder of the run, which becomes visible when it is complete; returns its checkpoint.

    `advance` is called with the bytes of each tensor that is written. If anything fails, nothing is left.
    """
    final = run.directory
    assert final is not None
    with _replaced_directory(run):
        step = found.checkpoint.step if states.of else 0
        checkpoint = path_of(run.checkpoints, step)
        checkpoint.mkdir(parents=True)
        tensors = contents(run, model, states)
        _write_tensors(checkpoint / file_of(0), tensors, found, advance)
        facts = _facts(run, step, f"{form}: {found.checkpoint.path.absolute()}", checkpoint / file_of(0))
        write_whole(checkpoint / MANIFEST, encode(facts, _table(tensors)))
        sync_path(checkpoint)
        make_directory(run)
    return path_of(final / "checkpoints", step)


@contextmanager
def _replaced_directory(run: Run) -> Iterator[None]:
    """The block writes the folder of the run under another name, which is changed when the block has ended."""
    final = run.directory
    assert final is not None
    partial, is_first = final.with_name(f".{final.name}.partial"), not final.parent.exists()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        run.directory = partial
        yield
        partial.rename(final)
        sync_path(final.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_first and final.parent.is_dir() and not any(final.parent.iterdir()):
            final.parent.rmdir()
        if isinstance(error, OSError):
            raise RunError(f"cannot write '{final}': {error.strerror or error}") from error
        raise
    finally:
        run.directory = final


def _write_tensors(path: Path, tensors: list[NewTensor], found: Match, advance: Callable[[int], None]) -> None:
    by_key = {one.key: one for one in tensors}

    def produce(key: str) -> Tensor:
        one = by_key[key]
        if one.value is not None:
            values = torch.tensor(one.value, dtype=getattr(torch, one.dtype))
        else:
            values = _read(one, found)
        advance(one.num_bytes)
        return values

    starts = {one.key: (0,) * len(one.shape) for one in tensors}
    write_safetensors(
        path, [(name_in_file(one.key, starts[one.key]), one.dtype, one.shape, one.key) for one in tensors], produce
    )


def _read(one: NewTensor, found: Match) -> Tensor:
    """The values of a tensor. UsageError if it has NaN, also where no link describes an element."""
    dtype = getattr(torch, one.dtype)
    values = torch.full(one.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
    state = WEIGHT if one.state == "buffer" else one.state
    fill_ours(found.links[one.parameter], (0,) * len(one.shape), values, found.reader(state))
    if dtype.is_floating_point and bool(values.isnan().any()):
        raise UsageError(
            f"'{found.checkpoint.path}' has NaN, or no values at all, for some elements of '{one.key}'; import a "
            f"checkpoint that was saved before its run diverged"
        )
    if one.state == WEIGHT:
        _refuse_other_copies(one, found, dtype)
    return values


def _refuse_other_copies(one: NewTensor, found: Match, dtype: torch.dtype) -> None:
    """Raise UsageError unless the tensors that repeat a parameter are equal to it."""
    links, copies = found.links[one.parameter], found.present_copies(one.parameter)
    link = differing_copy(links, copies, found.reader(), ((0,) * len(one.shape), one.shape), dtype)
    if link is not None:
        copy, repeated = found.name(link.public(0)), found.sources(one.parameter)[0]
        raise UsageError(
            f"'{found.checkpoint.path}': '{copy}' and '{repeated}' have different values, but the model has one "
            f"parameter ('{one.parameter}') for both; import a checkpoint in which they are equal"
        )


def _table(tensors: list[NewTensor]) -> TensorTable:
    return TensorTable.of(
        {
            one.key: {
                "shape": list(one.shape),
                "dtype": one.dtype,
                "chunks": [[file_of(0), [0] * len(one.shape), list(one.shape)]],
            }
            for one in tensors
        }
    )


def _facts(run: Run, step: int, imported: str, file: Path) -> dict[str, Any]:
    """The facts of the manifest. The run has consumed no data of its own."""
    return {
        "step": step,
        "samples": 0,
        "tokens": 0,
        "loader": {},
        "states": {},
        "layout": "",
        "world_size": 1,
        "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
        "imported": printable(imported),
        "provenance": provenance(run),
        "config": run.config.resolved(),
        "files": {file.name: {"bytes": file.stat().st_size, "crc32": crc32(file)}},
    }


def refuse_unusable_name(directory: Path) -> None:
    """Raise UsageError if the folder of the new run has files."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"'{directory}' exists already and is no empty folder; use another --name, or remove it")
