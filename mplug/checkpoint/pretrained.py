"""Start a run with the weights of another run's checkpoint (`checkpoint.pretrained`). The layouts may differ."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint.folder import complete, read_manifest
from mplug.checkpoint.index import shapes_of
from mplug.checkpoint.names import MANIFEST
from mplug.config.sources import source_of
from mplug.contracts import Piece
from mplug.errors import UsageError
from mplug.run.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mplug.checkpoint.choice import Chosen
    from mplug.model.model import Model

FIELD = "checkpoint.pretrained"


def pretrained_of(run: Run) -> Path | None:
    """The checkpoint with which a new run begins, by manifests alone: the newest valid one if the config names a run.

    None if `checkpoint.pretrained` is null. Raises UsageError if there is no such checkpoint.
    """
    path = newest_pretrained(run)
    if path is None or not _is_of_named_run(run, path):
        return path
    from mplug.checkpoint.choice import newest_readable  # imports pydantic

    return newest_readable(path.parent).path


def newest_pretrained(run: Run) -> Path | None:
    """The checkpoint that `checkpoint.pretrained` names by its folder or the folder of its run; None if it is null.

    Of a run it is the newest complete one, which may be damaged. Raises UsageError if there is no such checkpoint.
    """
    word = run.config.checkpoint.pretrained
    if word is None:
        return None
    folder = Path(word).expanduser()
    if os.path.lexists(folder / MANIFEST):
        return folder.resolve() if folder.is_symlink() else folder  # the user may name a link
    paths = complete(folder / "checkpoints")
    if not paths:
        source = source_of(run.config.settings, ("checkpoint", "pretrained"))
        raise UsageError(
            f"{FIELD} ({source}): '{word}' is not a checkpoint or the folder of a run with one; use either of them"
        )
    return paths[-1]


def _is_of_named_run(run: Run, path: Path) -> bool:
    """Whether the config names the run of a checkpoint, and not the checkpoint itself."""
    given = run.config.checkpoint.pretrained
    return given is not None and path.parent == Path(given).expanduser() / "checkpoints"


def refuse_another_model(path: Path, model: "Model") -> None:
    """Raise UsageError unless the checkpoint has the model's parameters, by name and logical shape."""
    saved = weights_in(shapes_of(read_manifest(path)))
    for name, placement in model.placements.items():
        if name not in saved:
            raise UsageError(
                f"{FIELD} '{path}' has no parameter '{name}', which the model has; use a checkpoint of this model"
            )
        if saved[name] != placement.shape:
            raise UsageError(
                f"{FIELD} '{path}' has '{name}' with shape {saved[name]}, but the model has {placement.shape}; "
                f"use the model config of the checkpoint"
            )
    refuse_larger(f"{FIELD} '{path}'", saved, model)


def refuse_larger(label: str, weights: "Iterable[str]", model: "Model") -> None:
    """Raise UsageError if a checkpoint has a parameter that the model lacks; `label` names the checkpoint.

    `weights` are the names of the checkpoint's parameters.
    """
    for extra in sorted(set(weights) - model.placements.keys()):
        raise UsageError(f"{label} has the parameter '{extra}', which the model lacks; use a checkpoint of this model")


def weights_in(shapes: "Mapping[str, tuple[int, ...]]") -> dict[str, tuple[int, ...]]:
    """Of the shapes of a checkpoint's tensors, those of its parameters, by their names."""
    return {
        name.removesuffix("/weight"): shape
        for name, shape in shapes.items()
        if name.endswith("/weight") and name[0] != "/"
    }


def load_weights(run: Run, model: "Model", pieces: list[Piece], path: Path) -> "Chosen":
    """Load the weights and module states of a checkpoint into the model of a new run.

    If the config names the checkpoint's run and the checkpoint is not valid, load the newest valid one before it.
    """
    from mplug.checkpoint.boxes import State, buffer_boxes, held_boxes
    from mplug.checkpoint.choice import Chosen, choose
    from mplug.checkpoint.opened import open_together
    from mplug.checkpoint.saver import load
    from mplug.checkpoint.verified import Verified
    from mplug.model.pieces import held_values, write_weights

    state: State = {
        f"{held.name}/weight": held_boxes(held.placement, held.values, run.rank) for held in held_values(model, pieces)
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
