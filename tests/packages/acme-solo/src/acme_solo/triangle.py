"""A supplier of the slot of `acme_solo.decoder.Mean`: the means as one product."""

from typing import TYPE_CHECKING

from mplug import kernel

if TYPE_CHECKING:
    from torch import Tensor


@kernel("Mean.core", captures=True)
def triangle(x: "Tensor") -> "Tensor":
    """[B, S, F] -> [B, S, F]: a product with the matrix whose row s has 1 / (s + 1) in its first s + 1 columns."""
    import torch  # here, because choosing a plugin must not import torch

    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).tril()
    return (ones / ones.sum(dim=1, keepdim=True)) @ x
