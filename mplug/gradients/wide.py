"""The wider dtype in which values are summed."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
