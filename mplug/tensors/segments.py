"""The segments of packed samples. B samples, N segments of a sample at most."""

import torch
from torch import Tensor


def numbered(lengths: Tensor, length: int) -> Tensor:
    """The number of the segment that contains each of `length` positions: lengths [B, N] -> [B, length]."""
    ends = lengths.cumsum(dim=1)  # [B, N]
    return torch.searchsorted(
        ends, torch.arange(length, device=ends.device).expand(len(ends), -1).contiguous(), right=True
    )
