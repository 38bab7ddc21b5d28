"""Weights for commands that run a saved model forward, without a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mplug import Model, Run
from mplug.commands import build_model
from mplug_saving.boxes import held_boxes


@dataclass(frozen=True)
class DrawnWeights:
    """In the place of `mplug_pretrained.SavedModel`: random weights that follow from the names of the parameters."""

    path: Path

    def load(self, run: Run, allocate: Callable[[Run, Model], None]) -> Model:
        """The model with this rank's parts of the weights."""
        model = build_model(run)
        allocate(run, model)
        for name, parameter in model.parameters().items():
            placement = model.placements[name]
            whole = drawn(name, placement.shape)
            for start, part in held_boxes(placement, parameter.data, run.rank).parts.items():
                part.copy_(whole[tuple(slice(at, at + n) for at, n in zip(start, part.shape, strict=True))])
        model.weights_written()
        return model

    def uses_averages(self, run: Run) -> bool:
        """No weights are averages."""
        return False


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a parameter."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 3
