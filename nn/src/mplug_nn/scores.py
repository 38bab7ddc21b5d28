"""How routers turn logits into scores and gates: the entries of the open list `mplug.router_scores`.

E experts, k experts chosen by a token.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mplug_nn.named import ROUNDING, Named, differs_in_parts, tried_numbers
from mplug_nn.open_lists import SCORES as NAMES


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class RouterScore:
    """An entry of the list; the functions act on the last dimension.

    - `judged`: logits [..., E] -> scores [..., E]. The experts with the highest scores are chosen.
    - `gates`: the scores of the chosen experts [..., k] -> their gates [..., k].
    - `probabilities`: scores [..., E] -> [..., E] with sum 1, for the balancing loss.
    """

    judged: Callable[[Tensor], Tensor]
    probabilities: Callable[[Tensor], Tensor]
    gates: Callable[[Tensor], Tensor] = _unchanged


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1)


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def _normalized(x: Tensor) -> Tensor:
    return x / x.sum(dim=-1, keepdim=True)


SOFTMAX = RouterScore(_softmax, _unchanged)
SIGMOID = RouterScore(_sigmoid, _normalized)
SOFTMAX_OF_CHOSEN = RouterScore(_unchanged, _softmax, _softmax)
"""The experts with the highest logits; a softmax over these logits alone (gpt-oss)."""


def _fault(entry: RouterScore) -> str:
    scores = entry.judged(tried_numbers())
    functions = {"judged": entry.judged, "gates": entry.gates, "probabilities": entry.probabilities}
    for name, function in functions.items():
        if differs_in_parts(function, 0, tried_numbers() if name == "judged" else scores):
            return (
                f"computes `{name}` of a token from other tokens, so a token's experts would depend on the micro "
                f"batch; reduce along the last dimension only (dim=-1, keepdim=True)"
            )
    if not bool(((entry.probabilities(scores).sum(dim=-1) - 1).abs() <= ROUNDING).all()):
        return "returns `probabilities` whose sum is not 1, so the balancing loss would have another scale"
    return ""


SCORES = Named(NAMES, RouterScore, plain=NAMES.own, fault=_fault)
