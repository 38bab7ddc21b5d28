"""How routers turn logits into scores and gates: the entries of the open list `mplug.router_scores`.

B batch, S sequence, E experts, k experts chosen by a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug_nn.named import ROUNDING, Named, differs_in_parts, tried_numbers
from mplug_nn.open_lists import SCORES as NAMES


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class RouterScore:
    """An entry of the list; all functions but `balanced` act on the last dimension.

    - `judged`: logits [..., E] -> scores [..., E]. The experts with the highest scores are chosen.
    - `gates`: the scores of the chosen experts [..., k] -> their gates [..., k].
    - `probabilities`: scores [..., E] -> [..., E] with sum 1, for the balancing loss.
    - `balanced`: None, or logits [B, S, E] of whole sequences -> [B, S, E], each sequence by itself. In training, the
      experts with the highest of these values are chosen, in place of those with the highest scores.
    """

    judged: Callable[[Tensor], Tensor]
    probabilities: Callable[[Tensor], Tensor]
    gates: Callable[[Tensor], Tensor] = _unchanged
    balanced: Callable[[Tensor], Tensor] | None = None


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1)


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def _normalized(x: Tensor) -> Tensor:
    return x / x.sum(dim=-1, keepdim=True)


def sinkhorn(logits: Tensor) -> Tensor:
    """Logits [B, S, E] of whole sequences -> shares [B, S, E] of experts in tokens, in fp32 or wider.

    exp(logits) is multiplied by a factor of each token and one of each expert, so that the shares of a token sum to 1,
    and those of an expert sum to S / E in each sequence (Sinkhorn and Knopp; arXiv 2202.01169, section 3.1). The number
    of rounds is fixed, so the CPU does not wait for the device.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_expert = torch.zeros_like(wide[:, :1])  # [B, 1, E]
    even = math.log(wide.shape[1] / wide.shape[2])
    for _ in range(ROUNDS):
        of_token = -(wide + of_expert).logsumexp(dim=-1, keepdim=True)  # [B, S, 1]
        of_expert = even - (wide + of_token).logsumexp(dim=1, keepdim=True)
    return (wide + of_expert).softmax(dim=-1)


ROUNDS = 20
"""Rounds of `sinkhorn`. Each one scales tokens, then experts."""
SOFTMAX = RouterScore(_softmax, _unchanged)
SIGMOID = RouterScore(_sigmoid, _normalized)
SOFTMAX_OF_CHOSEN = RouterScore(_unchanged, _softmax, _softmax)
"""The experts with the highest logits; a softmax over these logits alone (gpt-oss)."""
SINKHORN = RouterScore(_softmax, _unchanged, balanced=sinkhorn)
SINKHORN_SIGMOID = RouterScore(_sigmoid, _normalized, balanced=sinkhorn)
"""Megatron-Core's routing 'sinkhorn' has a softmax for several experts of a token, and a sigmoid for one."""


def _fault(entry: RouterScore) -> str:
    scores = entry.judged(tried_numbers())
    functions = {"judged": entry.judged, "gates": entry.gates, "probabilities": entry.probabilities}
    for name, function in functions.items():
        if differs_in_parts(function, 0, tried_numbers() if name == "judged" else scores):
            return (
                f"computes `{name}` of a token from other tokens, so a token's experts would depend on the micro "
                f"batch; reduce along the last dimension only (dim=-1, keepdim=True)"
            )
    samples = tried_numbers().view(2, 2, 2)
    if entry.balanced is not None and differs_in_parts(entry.balanced, 0, samples):
        return (
            "computes `balanced` of a sequence from other sequences, so a token's experts would depend on the micro "
            "batch; reduce along the last two dimensions only"
        )
    if not bool(((entry.probabilities(scores).sum(dim=-1) - 1).abs() <= ROUNDING).all()):
        return "returns `probabilities` whose sum is not 1, so the balancing loss would have another scale"
    return ""


SCORES = Named(NAMES, RouterScore, plain=NAMES.own, fault=_fault)
