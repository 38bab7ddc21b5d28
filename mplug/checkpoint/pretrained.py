"""Start a run with the weights of another run's checkpoint (`checkpoint.pretrained`), under any layout of both."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint.folder import complete, read_manifest
from mplug.checkpoint.index import shapes_of
from mplug.checkpoint.names import MANIFEST
from mplug.contracts import Piece
from mplug.errors import UsageError
from mplug.run.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mplug.checkpoint.choice import Choice
    from mplug.model.model import Model

FIELD = "checkpoint.pretrained"


def pretrained_of(run: Run) -> Path | None:
    """The checkpoint that a new run begins with, by the manifests alone: if the config names a run, its newest valid.

    None if the config names no checkpoint. Raises UsageError if there is none.
    """
    path = newest_pretrained(run)
    if path is None or not _is_of_named_run(run, path):
        return path
    from mplug.checkpoint.choice import newest_readable  # imports pydantic

    return newest_readable(path.parent).path


def newest_pretrained(run: Run) -> Path | None:
    """The checkpoint that the config names, or the newest complete one of the run that it names, which may be damaged.

    None if the config names neither. Raises UsageError if there is no checkpoint.
    """
    given = run.config.checkpoint.pretrained
    if given is None:
        return None
    folder = Path(given).expanduser()
    if os.path.lexists(folder / MANIFEST):
        return folder.resolve() if folder.is_symlink() else folder  # the user has named the link
    found = complete(folder / "checkpoints")
    if not found:
        raise UsageError(f"{FIELD} '{given}' is no checkpoint, nor the folder of a run that has one; name either")
    return found[-1]


def _is_of_named_run(run: Run, path: Path) -> bool:
    """Whether the config names the run of a checkpoint, and not the checkpoint itself."""
    given = run.config.checkpoint.pretrained
    return given is not None and path.parent == Path(given).expanduser() / "checkpoints"


def refuse_another_model(path: Path, model: "Model") -> None:
    """Raise UsageError unless the checkpoint has the model's parameters, by name and logical shape."""
    saved = weights_in(shapes_of(read_manifest(path)))
    for name, placement in model.placements.items():
        if name not in saved:
            raise UsageError(f"{FIELD} '{path}' has no parameter '{name}'; it is of another model")
        if saved[name] != placement.shape:
            raise UsageError(
                f"{FIELD} '{path}' holds '{name}' with shape {saved[name]}, and the model has {placement.shape}; "
                f"give the model the config that it was saved under"
            )
    refuse_larger(f"{FIELD} '{path}'", saved, model)


def refuse_larger(named: str, weights: "Iterable[str]", model: "Model") -> None:
    """Raise UsageError if a checkpoint has a parameter that the model lacks; the message calls it `named`.

    `weights` are the names of the checkpoint's parameters.
    """
    for extra in sorted(set(weights) - model.placements.keys()):
        raise UsageError(f"{named} has a parameter '{extra}' that the model lacks; it is of another model")


def weights_in(shapes: "Mapping[str, tuple[int, ...]]") -> dict[str, tuple[int, ...]]:
    """Of the shapes of a checkpoint's tensors, those of its parameters, by their names."""
    return {
        name.removesuffix("/weight"): shape
        for name, shape in shapes.items()
        if name.endswith("/weight") and name[0] != "/"
    }


def load_weights(run: Run, model: "Model", pieces: list[Piece], path: Path) -> "Choice":
    """Begin with a checkpoint's weights and the states of its modules; all else of the run is new.

    If the config names the checkpoint's run and the checkpoint is not valid, begin with the newest valid one before it.
    """
    from mplug.checkpoint.boxes import State, buffer_boxes, held_boxes
    from mplug.checkpoint.choice import Chosen, choose
    from mplug.checkpoint.opened import open_together
    from mplug.checkpoint.saver import load
    from mplug.checkpoint.verified import Verified
    from mplug.model.pieces import held_values, write_weights

    state: State = {
        f"{one.name}/weight": held_boxes(one.placement, one.values, run.rank) for one in held_values(model, pieces)
    }
    verified = Verified()
    if _is_of_named_run(run, path):
        choice = choose(run, path, verified)
    else:
        opened = open_together(run, path)
        choice = Chosen(path, opened.facts, opened=opened)
    load(run, choice.opened, state | buffer_boxes(model, run.rank, held_boxes), verified)
    write_weights(pieces)
    model.weights_written()
    return choice
