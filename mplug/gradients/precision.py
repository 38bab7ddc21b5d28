"""The number formats of a run: the dtype of `trainer.precision`, and the wider dtype in which values are summed.

fp64 exists for tests: in fp64 a wrong sum exceeds a rounding error by orders of magnitude; in fp32 both look alike.
"""

import torch

from mplug.dtypes import PRECISIONS

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, name) for word, name in PRECISIONS.items()}
"""The config's `trainer.precision` -> the dtype of weights and activations."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters, gradient sinks and sums for weights of `dtype`: fp32, or fp64 if weights are fp64."""
    return torch.promote_types(dtype, torch.float32)
