"""Evaluations with the averages of the weights, if the optimizer keeps averages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mplug.contracts.optimizer import AVERAGE
from mplug.model.pieces import write_weights
from mplug.run.run import Run
from mplug.training.assembly import Parts


@contextmanager
def averages_in_place(run: Run, parts: Parts) -> Iterator[None]:
    """In the block, the model computes with the averages (`trainer.eval_averages`). Collective.

    Masters and averages exchange their values, and again after the block. An error in the block ends the run, so
    nothing is exchanged after it. The memory is that of the largest piece.
    """
    if not (parts.optimizer.averages and run.config.trainer.eval_averages):
        yield
        return
    _exchange(parts)
    yield
    _exchange(parts)


@torch.no_grad()
def _exchange(parts: Parts) -> None:
    parts.model.weights_settled()  # an exchange that is under way still reads the masters
    for piece in parts.pieces:
        average = parts.optimizer.state(piece).get(AVERAGE)
        if isinstance(average, torch.Tensor):  # the optimizer of a group may keep none
            trained = piece.master.clone()
            piece.master.copy_(average)
            average.copy_(trained)
    write_weights(parts.pieces)
    parts.model.weights_written()
