"""The meaning of parameters and buffers, declared where a module creates them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from mplug.errors import counted, suggest
from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.plan import Buffer, Init, Parameter, Segment

M = TypeVar("M", bound=nn.Module)
Dims = Sequence[str | Segment | tuple[Segment, ...]]
ON_TENSOR, ON_MODULE = "declared_entry", "declared_entries"
"""The attributes of a tensor and of a module that hold declarations. Only `describe` reads them, before a run."""


@dataclass(frozen=True)
class Declared:
    """The meaning of a parameter, as `mplug.Parameter`, with initial values that the model may decide.

    `init` is an `Init`, or the name of a field of the model's `Inits`: 'weight' for most matrices, 'residual' for
    projections into the residual stream.
    """

    dims: Dims
    init: Init | Literal["weight", "residual"] = "weight"
    over: tuple[str, ...] = TOKENS
    decay: bool | None = None
    trainable: bool = True

    def entry(self, inits: Inits) -> Parameter:
        """The entry of a plan."""
        init = self.init if isinstance(self.init, Init) else getattr(inits, self.init)
        return Parameter(tuple(self.dims), init, self.over, self.decay, self.trainable)


def parameter(
    shape: Sequence[int],
    dims: Dims,
    init: Init | Literal["weight", "residual"] = "weight",
    over: tuple[str, ...] = TOKENS,
    decay: bool | None = None,
    trainable: bool = True,
) -> nn.Parameter:
    """A parameter without values, whose meaning `mplug.describe` adds to the plan.

    `dims` are the named axes or segments of its dimensions, `over` the activation axes that it is broadcast over (see
    `mplug.Parameter`), and `init` its initial values (see `mplug.Declared`). ValueError if `dims` and `shape` differ in
    length, or a segment has another length than its dimension.
    """
    made = nn.Parameter(torch.empty(*shape))
    declared = Declared(dims, init, over, decay, trainable)
    _refuse_other_shape("a parameter", declared.dims, made.shape)
    setattr(made, ON_TENSOR, declared)
    return made


def declare(module: M, **entries: Declared | Buffer) -> M:
    """Say what a module's own parameters and buffers mean, by their names, and return the module.

    For a module that cannot know it: `self.up = mplug.declare(nn.Linear(...), weight=Declared(("mlp", "embed")))`. This
    overrides what the module says of itself. ValueError for a name that the module does not have, and for other
    dimensions than the tensor has.
    """
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for name, entry in entries.items():
        if name not in own:
            raise ValueError(f"{type(module).__name__} has no parameter or buffer '{name}'{suggest(name, own)}")
        _refuse_other_shape(f"'{name}' of {type(module).__name__}", entry.dims, own[name].shape)
    setattr(module, ON_MODULE, {**getattr(module, ON_MODULE, {}), **entries})
    return module


def declarations(module: nn.Module, inits: Inits) -> Iterator[Entries]:
    """What is declared about a module's own tensors: for the module first, then with the tensors themselves."""
    of_module: Mapping[str, Declared | Buffer] = getattr(module, ON_MODULE, {})
    yield {name: one if isinstance(one, Buffer) else one.entry(inits) for name, one in of_module.items()}
    found = {name: getattr(one, ON_TENSOR, None) for name, one in module.named_parameters(recurse=False)}
    yield {name: one.entry(inits) for name, one in found.items() if isinstance(one, Declared)}


def _refuse_other_shape(what: str, dims: Dims, shape: Sequence[int]) -> None:
    if len(dims) != len(shape):
        raise ValueError(f"{what} has shape {tuple(shape)}, and {counted(len(dims), 'dimension')} declared")
    for number, (dim, length) in enumerate(zip(dims, shape, strict=True)):
        segments = () if isinstance(dim, str) else (dim,) if isinstance(dim, Segment) else dim
        if segments and sum(segment.length for segment in segments) != length:
            raise ValueError(
                f"{what} has shape {tuple(shape)}, and the segments of dimension {number} do not sum to {length}"
            )
