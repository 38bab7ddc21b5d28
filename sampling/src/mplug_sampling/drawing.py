"""Which of all tokens a random number draws, without an order of the tokens by their probability.

B samples, V tokens, C blocks of at most `BLOCK` tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Tokens of a block. The sums of blocks are computed first, and then those inside of one block of each sample."""


def drawn(log_probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The tokens [B] that numbers [B] in [0, 1) draw by log-probabilities [B, V], which need not sum to 1.

    The tokens share the numbers from 0 to 1 in the order of the vocabulary: token v has those from the probability of
    all tokens before it on. Sums are in fp64. A token of the probability 0 is never drawn. The CPU waits for nothing.
    """
    weights = log_probabilities.exp()
    size = weights.shape[-1]
    whole = size - size % BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)), dim=-1)
    upto = sums.cumsum(dim=-1)  # [B, C]
    wanted = numbers[:, None].to(torch.float64) * upto[:, -1:]
    block = _first_above(upto, wanted)
    before = pad(upto, (1, 0)).gather(1, block)
    tokens = block * BLOCK + torch.arange(BLOCK, device=block.device)
    own = weights.gather(1, tokens.clamp(max=size - 1)).double().masked_fill(tokens >= size, 0)
    return tokens.gather(1, _first_above(own.cumsum(dim=-1), wanted - before))[:, 0]


def _first_above(sums: Tensor, wanted: Tensor) -> Tensor:
    """The first place [B, 1] where ascending sums [B, N] exceed what is wanted [B, 1], or the last one where they grow.

    Rounding may leave all of them below it.
    """
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((sums <= wanted).sum(dim=-1, keepdim=True), last)
