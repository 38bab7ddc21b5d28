"""The supplier of `Router.balanced_scores` for Sinkhorn's shares: one kernel instead of five in each of 20 rounds.

B batch, S tokens of a sequence, E experts. In plain torch, the compiler cannot join the rounds, because each one sums
over all tokens of a sequence.
"""

import math

import torch
from torch import Tensor

from mplug_nn import fake, operator
from mplug_nn.scores import ROUNDS

TILE, NUM_WARPS = 8192, 16
"""Numbers of a tile that a program reads at once, and its warps."""


def balanced_scores(logits: Tensor, score: str) -> Tensor:
    """Logits [B, S, E] of whole sequences -> shares [B, S, E] in fp32. `score` is one of those with Sinkhorn's rounds.

    No gradient flows through it.
    """
    return sinkhorn(logits)


@operator("mplug_triton::sinkhorn")
def sinkhorn(logits: Tensor) -> Tensor:
    """`mplug_nn.scores.sinkhorn`, in fp32."""
    from mplug_triton.sinkhorn_kernel import triton_sinkhorn

    logits = logits.contiguous()
    shares, (samples, length, experts) = torch.empty_like(logits, dtype=torch.float32), logits.shape
    if shares.numel():
        width = 1 << (experts - 1).bit_length()
        tokens = max(1, min(TILE // width, 1 << (length - 1).bit_length()))
        with torch.cuda.device_of(logits):
            triton_sinkhorn[(samples,)](
                logits,
                shares,
                length,
                math.log(length / experts),
                E=experts,
                WIDTH=width,
                TOKENS=tokens,
                ROUNDS=ROUNDS,
                num_warps=NUM_WARPS,
            )
    return shares


@fake("mplug_triton::sinkhorn")
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
