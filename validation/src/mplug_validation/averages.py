"""Evaluations with other weights than the masters, if the optimizer keeps such."""

from collections.abc import Iterator
from contextlib import contextmanager

from mplug.contracts.optimizer import AVERAGE
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug_validation.other_weights import in_place


@contextmanager
def evaluated_in_place(run: Run, parts: Parts) -> Iterator[None]:
    """In the block, the model computes with averages (`trainer.eval_averages`) or `Optimizer.weights`. Collective."""
    optimizer = parts.optimizer
    state = AVERAGE if optimizer.averages and run.config.trainer.eval_averages else optimizer.weights
    if state is None:
        yield
        return
    with in_place(state, parts.model, parts.pieces, optimizer):
        yield
