"""The number formats of a run: what `trainer.precision` names, and the wider format in which values are summed.

fp64 exists for tests: a wrong sum and a rounding error, which are alike in fp32, differ by orders of magnitude in it.
"""

import torch

from mplug.dtypes import PRECISIONS

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, name) for word, name in PRECISIONS.items()}
"""The config's `trainer.precision` -> the dtype of weights and activations."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters, gradient sinks and sums beside weights of `dtype`: fp32, or fp64 where weights are fp64."""
    return torch.promote_types(dtype, torch.float32)
