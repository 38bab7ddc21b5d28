"""Evaluations with the averages of the weights, if the optimizer keeps averages."""

from collections.abc import Iterator
from contextlib import contextmanager

from mplug.contracts.optimizer import AVERAGE
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug.training.other_weights import in_place


@contextmanager
def averages_in_place(run: Run, parts: Parts) -> Iterator[None]:
    """In the block, the model computes with the averages (`trainer.eval_averages`). Collective."""
    if not (parts.optimizer.averages and run.config.trainer.eval_averages):
        yield
        return
    with in_place(AVERAGE, parts.model, parts.pieces, parts.optimizer):
        yield
