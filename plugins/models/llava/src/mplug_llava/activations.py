"""The activation of CLIP, an entry of the open list `mplug.activations`."""

import torch
from torch import Tensor

from mplug_nn import ActivationFunction

SLOPE = 1.702


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SLOPE * x)


QUICK_GELU = ActivationFunction(_quick_gelu)
"""GELU by a sigmoid (arXiv 1606.08415, section 2)."""
