"""Refuse optimizer states that a checkpoint cannot hold or lacks, and load weights for inference."""

from collections.abc import Callable
from pathlib import Path

from mplug.checkpoint.boxes import Boxed, buffer_boxes, held_boxes, state_boxes
from mplug.checkpoint.folder import read_manifest
from mplug.checkpoint.index import shapes_of
from mplug.checkpoint.opened import open_together
from mplug.checkpoint.saver import load, refuse_another
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError
from mplug.model.build import allocate_parts, build_model, states_without_memory
from mplug.model.model import Model
from mplug.run.run import Run


def refuse_unsavable_states(run: Run, model: Model, resume_from: Path | None = None) -> None:
    """Raise UsageError if a checkpoint cannot hold a state of the optimizer. Allocates no memory.

    Also raises UsageError if the checkpoint `resume_from` lacks a state of this rank's modules or an optimizer state of
    its parameters.
    """
    optimizer, pieces = states_without_memory(run, model)
    if resume_from is not None:
        state = {
            f"{piece.name}/{name}": Boxed(state_boxes(piece, held, run.rank, held_boxes).shape, {})
            for piece in pieces
            for name, held in {"weight": piece.master, **optimizer.state(piece)}.items()
        }
        state |= {f"{name}/buffer": Boxed(model.buffer_placements[name].shape, {}) for name in model.states()}
        refuse_another(resume_from, shapes_of(read_manifest(resume_from)), state)


def load_for_inference(
    run: Run,
    path: Path,
    verified: Verified | None = None,
    allocate: Callable[[Run, Model], None] = allocate_parts,
) -> Model:
    """The model of a run with the weights of a checkpoint, without gradients and optimizer.

    `allocate` gives the model its memory. `allocate_parts` gives memory alone, and `allocate_forward` also lets
    strategies take part that gather weights.

    Files in `verified` are not read to compare their checksums. If the run is still training and replaces the
    checkpoint at the same time, the function loads the new one.
    """
    opened, model = open_together(run, path), build_model(run)
    expected = {f"{name}/weight": Boxed(placement.shape, {}) for name, placement in model.placements.items()}
    refuse_another(path, opened.index.shapes, expected)  # before memory is allocated
    allocate(run, model)
    weights = {
        f"{name}/weight": held_boxes(model.placements[name], parameter.data, run.rank)
        for name, parameter in model.parameters().items()
    }
    while True:
        try:
            load(run, opened, weights | buffer_boxes(model, run.rank, held_boxes), verified)
            model.weights_written()
            return model
        except (UsageError, RunError):  # the same on all ranks
            newer = open_together(run, path)
            if newer.checksum == opened.checksum:
                raise
            opened = newer
            refuse_another(path, opened.index.shapes, expected)
