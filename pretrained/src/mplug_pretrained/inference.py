"""Load the weights of a run's checkpoint into a model that is not trained."""

from collections.abc import Callable
from pathlib import Path

from mplug.errors import RunError, UsageError
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_saving.boxes import Boxed, buffer_boxes, held_boxes
from mplug_saving.opened import open_together
from mplug_saving.saver import load, refuse_another
from mplug_saving.verified import Verified


def load_for_inference(
    run: Run,
    path: Path,
    verified: Verified | None = None,
    allocate: Callable[[Run, Model], None] = allocate_parts,
) -> Model:
    """The model of a run with the weights of a checkpoint, or their averages, without gradients and optimizer.

    `allocate` gives the model its memory. `allocate_parts` gives memory alone, and `allocate_forward` also lets
    strategies take part that gather weights.

    Files in `verified` are not read to compare their checksums. If the run is still training and replaces the
    checkpoint at the same time, the function loads the new one.
    """
    opened, model = open_together(run, path), build_model(run)
    index, averages = opened.index, run.config.trainer.eval_averages
    key_of = {name: index.values_of(name, averages) for name in model.placements}
    expected = {key_of[name]: Boxed(placement.shape, {}) for name, placement in model.placements.items()}
    refuse_another(path, opened.index.shapes, expected)  # before memory is allocated
    allocate(run, model)
    weights = {
        key_of[name]: held_boxes(model.placements[name], parameter.data, run.rank)
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
