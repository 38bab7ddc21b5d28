"""The activations of feed-forward parts: the entries of the open list `mplug.activations`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn.named import Named, differs_in_parts, tried_numbers
from mplug_nn.open_lists import ACTIVATIONS as NAMES


@dataclass(frozen=True)
class ActivationFunction:
    """An entry of the list. `compute(x)`, or `compute(gate, up)` if `gated`: [..., F] each -> [..., F], element-wise.

    The up projection of a gated activation has twice as many rows, those of the gate first.
    """

    compute: Callable[..., Tensor]
    gated: bool = False


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu(x: Tensor) -> Tensor:
    return F.relu(x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


CLAMP, SLOPE = 7.0, 1.702


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


GELU = ActivationFunction(F.gelu)
"""arXiv 1606.08415, exact."""
GELU_TANH = ActivationFunction(_gelu_tanh)
"""By tanh, as in GPT-2."""
RELU = ActivationFunction(_relu)
RELU2 = ActivationFunction(_relu2)
"""The square of ReLU (arXiv 2109.08668)."""
SWIGLU = ActivationFunction(_swiglu, gated=True)
"""arXiv 2002.05202."""
GEGLU = ActivationFunction(_geglu, gated=True)
"""arXiv 2002.05202."""
GEGLU_TANH = ActivationFunction(_geglu_tanh, gated=True)
"""GeGLU by tanh, as in Gemma."""
CLAMPED_SWIGLU = ActivationFunction(_clamped_swiglu, gated=True)
"""gpt-oss: both projections are clamped to 7, the gate's sigmoid has the slope 1.702, and 1 is added to the other."""


def _fault(entry: ActivationFunction) -> str:
    x = tried_numbers()
    inputs = (x, x.flip(0)) if entry.gated else (x,)
    if any(differs_in_parts(entry.compute, dim, *inputs) for dim in (0, 1)):
        return (
            "is not element-wise: a number of its result depends on other numbers than those at its place, so it would "
            "compute something else where a layout divides its input; use a block of your own"
        )
    return ""


ACTIVATIONS = Named(NAMES, ActivationFunction, plain=("gelu", "gelu_tanh", "swiglu"), fault=_fault)


def is_gated(kind: str) -> bool:
    """Whether an activation multiplies two projections."""
    return ACTIVATIONS[kind].gated
