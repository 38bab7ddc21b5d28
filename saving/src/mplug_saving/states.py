"""Refuse optimizer states that a checkpoint cannot hold, or lacks."""

from pathlib import Path

from mplug.model.build import states_without_memory
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_saving.boxes import Boxed, held_boxes, tensors_of_piece
from mplug_saving.folder import read_manifest
from mplug_saving.index import shapes_of
from mplug_saving.saver import refuse_another


def refuse_unsavable_states(run: Run, model: Model, resume_from: Path | None = None) -> None:
    """Raise UsageError if a checkpoint cannot hold a state of the optimizer. Allocates no memory.

    Also raises UsageError if the checkpoint `resume_from` lacks a state of this rank's modules or an optimizer state of
    its parameters.
    """
    optimizer, pieces = states_without_memory(run, model)
    if resume_from is not None:
        state = {
            name: Boxed(boxed.shape, {})
            for piece in pieces
            for name, boxed in tensors_of_piece(piece, optimizer, run.rank, held_boxes).items()
        }
        state |= {f"{name}/buffer": Boxed(model.buffer_placements[name].shape, {}) for name in model.states()}
        refuse_another(resume_from, shapes_of(read_manifest(resume_from)), state)
