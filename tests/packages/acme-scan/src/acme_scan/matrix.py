"""The scan as one product with the matrix of all decays; it serves no reverse scan."""

from typing import TYPE_CHECKING

from mplug import kernel

if TYPE_CHECKING:
    from torch import Tensor


@kernel("Scan.core", captures=True)
def matrix(x: "Tensor", decay: "Tensor", reverse: bool) -> "Tensor":
    """y_s = sum over t <= s of sigmoid(decay)^(s - t) x_t; x [B, S, D], decay [D] -> [B, S, D]."""
    import torch  # here, because choosing a plugin must not import torch

    position = torch.arange(x.shape[1], device=x.device)
    distance = position[:, None] - position  # [S, T]
    powers = decay.sigmoid() ** distance.clamp(min=0)[..., None]  # [S, T, D]
    return torch.einsum("std,btd->bsd", powers * (distance >= 0)[..., None], x)
