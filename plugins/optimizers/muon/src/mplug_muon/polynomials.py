"""The iterations that orthogonalise matrices. N matrices of O rows and I columns; K = min(O, I)."""

from collections.abc import Iterator
from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]
"""(a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X."""

POLYNOMIALS: dict[str, tuple[list[Polynomial], list[Polynomial]]] = {
    "newton_schulz": ([], [(3.4445, -4.7750, 2.0315)]),
    "quintic": (
        [],
        [
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ],
    ),
    "polar_express": (
        [
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
        ],
        [(1.875, -1.25, 0.375)],
    ),
}
"""By the name of an iteration: the polynomials of the first steps, and those that repeat afterwards.

- newton_schulz: kellerjordan.github.io/posts/muon, also torch.optim.Muon. Singular values do not converge to 1: its
  slope at 0 is the steepest with which five iterations bring them near 1 (between 0.7 and 1.2).
- quintic: github.com/NVIDIA-NeMo/Emerging-Optimizers, the default of Megatron-LM.
- polar_express: arXiv 2505.16932; it contains the paper's division by 1.01, which keeps singular values below 1.
"""
EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by; a zero matrix stays zero."""


def polynomials(iteration: str, number: int) -> Iterator[Polynomial]:
    """The polynomials of so many steps."""
    first, following = POLYNOMIALS[iteration]
    return islice(chain(first, cycle(following) if following else repeat(first[-1])), number)


def orthogonalized(x: Tensor, iteration: str, num_iterations: int) -> Tensor:
    """x [N, O, I] -> matrices with the singular vectors of x and singular values near 1, in the dtype of x."""
    tall = x.shape[-2] > x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).clamp(min=EPS)
    y = (x / norm).to(x.dtype)  # no singular value above 1
    y = y.mT if tall else y  # [N, K, max(O, I)]: the smaller Gram matrix is cheaper
    for a, b, c in polynomials(iteration, num_iterations):
        gram = y @ y.mT  # [N, K, K]
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def precision(masters: torch.dtype, device: str) -> torch.dtype:
    """bf16 on GPUs, because the iteration needs no accuracy; fp32 on CPUs; fp64 for masters in fp64."""
    return masters if masters is torch.float64 or not device.startswith("cuda") else torch.bfloat16


def flops(rows: int, columns: int, num_iterations: int) -> float:
    """The FLOPs that orthogonalise a matrix of this shape."""
    small, large = sorted((rows, columns))
    return num_iterations * (4.0 * small * small * large + 2.0 * small**3)
