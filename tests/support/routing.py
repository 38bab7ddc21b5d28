"""Sizes of the tests of experts and routers, and gates of every kind."""

import torch

from mplug_nn import Gating

B, S, D, F_, E, K = 2, 5, 8, 12, 6, 2
POSITIONS, KEYS = torch.arange(S)[None], torch.tensor([3, 4])
CHOICES = [
    Gating(E, K),
    Gating(E, 1),
    Gating(E, K, normalize=False),
    Gating(E, 3, "sigmoid", scale=2.5),
    Gating(E, 2, "sigmoid", num_groups=3, top_groups=1),
    Gating(E, 3, "softmax", num_groups=3, top_groups=2),
    Gating(E, 2, "sigmoid", num_groups=6, top_groups=4),
]
