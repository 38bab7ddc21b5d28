"""The published form of a model's adapters, and how they are merged into weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug_pretrained.external import ExternalNames, ScoreHead


@dataclass(frozen=True)
class Merge:
    """How an export computes a tensor from parameters of a checkpoint: compute(*inputs) in fp32 or fp64.

    `inputs` are names of parameters. `compute` receives the whole tensors and returns a tensor of the shape of the
    parameter whose values it replaces.
    """

    inputs: tuple[str, ...]
    compute: Callable[..., Tensor]


@dataclass(frozen=True)
class RowNorms:
    """The Euclidean norms of `length` rows of a weight from row `start` on."""

    weight: str
    start: int
    length: int


def row_norms(weight: Tensor) -> Tensor:
    """The norms of the rows of a weight [O, I] -> [O], in at least fp32; the sums are in fp64.

    So a norm has the same bits under every layout, apart from ties of the last rounding.
    """
    return squares_of_rows(weight).sqrt().to(torch.promote_types(weight.dtype, torch.float32))


def squares_of_rows(weight: Tensor) -> Tensor:
    """The squared norms of the rows of a weight [O, I] -> [O], in fp64."""
    wide = weight.to(torch.float64)
    return (wide * wide).sum(dim=1)


@dataclass(frozen=True)
class Adapters:
    """The published form of the adapters alone: a folder that the format `format` (a name) reads and writes.

    `names` maps the adapters' parameters to the tensors of the folder; None, with a `reason`, if there is no such form.
    `config` are the fields that describe the adapters in the folder. A parameter in `offsets` is published as its sum
    with these norms (the magnitudes of DoRA). A new run begins with the adapters of the folder `path`.

    `check` compares such a folder with the run: check(the fields of its description, the names of its tensors) raises
    ValueError, with a clause ('have r=4, and the run has 8; use the settings of the folder'), unless the software of
    this format computes with the folder what the run computes. Without it, all fields must be those of `config`. The
    format compares the names and shapes of the tensors.

    `scored` returns the form of the adapters together with a head of scores that the run trains beside them; None if
    the format has no such form.
    """

    format: str
    names: ExternalNames | None
    config: Mapping[str, Any]
    offsets: Mapping[str, RowNorms] = field(default_factory=dict)
    path: Path | None = None
    reason: str = ""
    check: Callable[[Mapping[str, Any], Collection[str]], None] | None = None
    scored: "Callable[[ScoreHead], Adapters] | None" = None
