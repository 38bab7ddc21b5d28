"""Launches the kernel of the largest attention logits."""

import torch
import triton
from torch import Tensor

from mplug_triton.attention_launch import Tiles, padded, per_sample, strides
from mplug_triton.largest_logits_kernel import triton_largest_logits
from mplug_triton.sight import Sight

HALF = {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 128, 8, 3), 256: Tiles(128, 64, 8, 2)}
"""Padded width of a head -> tiles in formats of 16 bits."""
SINGLE = Tiles(32, 32, 4, 1)
"""Tiles in fp32, whose exact products are not computed by tensor cores."""


def largest_products(q: Tensor, k: Tensor, sight: Sight) -> Tensor:
    """q [B, S, H, K], k [B, T, G, K] -> the largest product of each head's queries and the keys that they see: [H].

    The products are in fp32; -inf for a head whose queries see no key.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (b, s, h, width), t = q.shape, k.shape[1]
    tiles = HALF[max(64, padded(width))] if q.element_size() == 2 else SINGLE
    found = q.new_empty((b, h, triton.cdiv(s, tiles.queries)), dtype=torch.float32)
    with torch.cuda.device_of(q):
        triton_largest_logits[(found.numel(),)](
            q, k, found, *sight, *strides(q, k), per_sample(sight.first), s, t, h, h // k.shape[2],
            K=width, WIDTH=padded(width), M=tiles.queries, N=tiles.keys,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return found.amax(dim=(0, 2))
