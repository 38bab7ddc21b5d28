"""The Newton-Schulz iteration that orthogonalises matrices. N matrices of O rows and I columns; K = min(O, I)."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X, from kellerjordan.github.io/posts/muon.

They do not converge to 1. They have the steepest slope at 0 with which five iterations bring singular values near 1
(between 0.7 and 1.2).
"""
EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by; a zero matrix stays zero."""


def orthogonalized(x: Tensor, num_iterations: int) -> Tensor:
    """x [N, O, I] -> matrices with the singular vectors of x and singular values near 1, in `precision(x)`."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)  # no singular value above 1
    y = (y.mT if tall else y).to(precision(x))  # [N, K, max(O, I)]: the smaller Gram matrix is cheaper
    for _ in range(num_iterations):
        gram = y @ y.mT  # [N, K, K]
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def precision(x: Tensor) -> torch.dtype:
    """bf16 on GPUs, because the iteration needs no accuracy; fp32 on CPUs; fp64 for matrices in fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return wide if wide is torch.float64 or x.device.type == "cpu" else torch.bfloat16
