"""The router of a mixture of experts, and what keeps the experts' load even.

B batch, S sequence, D embed, E experts, k chosen by a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.nn.linear import Gemm, multiply
from mplug.nn.random import Jitter
from mplug.nn.sink import Weights, add_product
from mplug.nn.statistics import add_auxiliary, count

Score = Literal["softmax", "sigmoid"]
Balance = Literal["none", "micro_batch", "sequence", "global_batch"]


def summed(values: Tensor, over: tuple[str, ...]) -> Tensor:
    """The default of the slot `Router.summed`: this process sees all of the named activation axes.

    values [...], a statistic through which no gradient flows -> its sum over the ranks among which any of the axes
    `over` is divided. The host fills it under every layout.
    """
    return values


@dataclass(frozen=True)
class Choice:
    """How a token's experts are chosen, and what weighs them.

    `score` turns logits into scores. The `top_k` best are chosen; with `num_groups` > 1, among the experts of the
    `top_groups` best groups, by the sum of a group's two best scores (arXiv 2412.19437, section 2.1.2). Gates are the
    scores of the chosen, divided by their sum if `normalize`, times `scale`.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        """logits [..., E] -> scores [..., E]."""
        return logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()

    def chosen(self, scores: Tensor) -> Tensor:
        """scores [..., E] -> the numbers of the experts [..., k], the best first."""
        if self.num_groups > 1:
            grouped = scores.unflatten(-1, (self.num_groups, -1))  # [..., G, E / G]
            worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            best = torch.zeros_like(worth, dtype=torch.bool)
            best = best.scatter(-1, worth.topk(self.top_groups, dim=-1).indices, True)
            scores = grouped.masked_fill(~best[..., None], float("-inf")).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    def gates(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The weights [..., k] of the chosen."""
        gates = scores.gather(-1, chosen)
        if self.normalize and self.top_k > 1:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return gates * self.scale


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide_wgrad(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    grad_y, rows = grad_y.flatten(0, -2), x.flatten(0, -2)
    if main_grad is None:
        return (grad_y.t() @ _wide(rows)).to(x.dtype)
    add_product(main_grad, torch.zeros((), dtype=torch.bool, device="cpu"), grad_y.t(), _wide(rows))
    return None


WIDE = Gemm(
    forward=lambda x, weight: F.linear(_wide(x), _wide(weight)),
    dgrad=lambda grad_y, weight: (grad_y @ _wide(weight)).to(weight.dtype),
    wgrad=_wide_wgrad,
)
"""Logits are fp32 whatever the precision (arXiv 2101.03961, section 2.4); what is kept for backward is not."""


class Router(nn.Module):
    """Chooses each token's experts, and takes part in the loss so that all experts are chosen about as often.

    The balancing loss (arXiv 2101.03961, section 2.2), E sum_i f_i P_i, is a sum over tokens n like the model's loss,
    `balance_coefficient` * E sum_n sum_i f_i p_ni: p are the scores, made to sum to 1, and f_i is the share of expert i
    in the choices of all the tokens that the loss covers, which carries no gradient. `balance` says which those are:

        sequence      those of the token's own sequence, whole under any layout      (arXiv 2412.19437, section 2.1.2)
        micro_batch   those of a micro batch, whole sequences of one data-parallel rank: depends on its size
        global_batch  those of the whole global batch of the step before: no step knows its own before it ends. The
                      first step has none: its shares are even

    The z-loss (arXiv 2202.08906), `z_coefficient` * sum_n (log sum_i exp z_ni)², depends on nothing but the token.
    Balancing without a loss (arXiv 2408.15664): `bias` [E] is added to the scores when experts are chosen, not to the
    gates, and after each step moves by `bias_rate` towards those whose load in the global batch was below the mean. It
    stays as it is where the router is frozen.

    Buffers, which a model's plan describes: `load` [E], how often each expert was chosen in a step, and `losses` [2],
    the step's sums of E sum_i f_i p_ni and of the z-loss, both without their coefficients, are statistics; `bias` [E]
    (where `bias_rate` > 0) and `last_load` [E] (where `balance` is 'global_batch') are states.
    """

    SLOTS = ("Router.summed",)
    load: Tensor
    losses: Tensor
    loss_scale: Tensor
    bias: Tensor | None
    last_load: Tensor | None

    def __init__(
        self,
        dim: int,
        choice: Choice,
        *,
        balance: Balance = "none",
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        bias_rate: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        super().__init__()
        self.choice, self.balance, self.bias_rate = choice, balance, bias_rate
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        experts = choice.num_experts
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.jitter = Jitter(jitter)
        self.summed: Callable[[Tensor, tuple[str, ...]], Tensor] = summed
        self.register_buffer("load", torch.zeros(experts, dtype=torch.float64), persistent=False)
        self.register_buffer("losses", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)
        self.register_buffer("bias", torch.zeros(experts) if bias_rate > 0 else None)
        last_load = torch.zeros(experts, dtype=torch.float64) if balance == "global_batch" else None
        self.register_buffer("last_load", last_load)

    @property
    def mixes(self) -> frozenset[str]:
        """A loss over a micro batch depends on all its samples; over positions it sums in a slot."""
        return frozenset({"batch"} if self.balance == "micro_batch" else ())

    @property
    def varies(self) -> str:
        """What of it depends on the layout."""
        if self.balance == "micro_batch":
            return "the balancing loss covers a micro batch, and trainer.micro_batch_size says what is in one"
        return ""

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], positions [1 or B, S], the samples' keys [B] -> chosen [B, S, k] int64, gates [B, S, k] fp32."""
        x = self.jitter(x, keys, positions)
        logits = multiply(x, Weights.of(self.weight), WIDE)  # [B, S, E]
        scores = self.choice.scores(logits)
        judged = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = self.choice.chosen(judged)
        gates = self.choice.gates(scores, chosen)
        return chosen, self._balanced(gates, logits, scores, chosen) if self.training else gates

    def _balanced(self, gates: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """The gates [B, S, k], through which the auxiliary losses take part; counts what was chosen."""
        counts = self._counts(chosen)  # [B, E]
        z_loss = logits.logsumexp(dim=-1).square().sum()
        uneven = torch.zeros_like(z_loss) if self.balance == "none" else self._uneven(scores, counts)
        count(self.load, counts.sum(dim=0))
        count(self.losses, torch.stack((uneven, z_loss)).detach().to(self.losses.dtype))
        loss = self.balance_coefficient * uneven + self.z_coefficient * z_loss
        return add_auxiliary(gates, loss, self.loss_scale) if loss.requires_grad else gates

    def _uneven(self, scores: Tensor, counts: Tensor) -> Tensor:
        """E sum_n sum_i f_i p_ni: as many as there are tokens, where all experts are chosen equally often."""
        probabilities = scores if self.choice.score == "softmax" else scores / scores.sum(dim=-1, keepdim=True)
        return (self._shares(counts)[:, None] * probabilities).sum() * self.choice.num_experts

    def _counts(self, chosen: Tensor) -> Tensor:
        """How often each expert was chosen in each sample [B, E], of the positions of this rank."""
        samples, experts = len(chosen), self.choice.num_experts
        places = chosen.flatten(1) + experts * torch.arange(samples, device=chosen.device)[:, None]
        zeros = torch.zeros(samples * experts, dtype=torch.int64, device=chosen.device)
        return zeros.scatter_add(0, places.flatten(), torch.ones_like(places).flatten()).view(samples, experts)

    def _shares(self, counts: Tensor) -> Tensor:
        """f, each expert's share of the choices that the loss covers: [B or 1, E]."""
        if self.balance == "global_batch":
            assert self.last_load is not None
            known = self.last_load + (self.last_load.sum() == 0)
            return (known / known.sum()).float()[None]
        counts = self.summed(counts, ("sequence",))
        counts = counts if self.balance == "sequence" else counts.sum(dim=0, keepdim=True)
        return counts / counts.sum(dim=-1, keepdim=True)

    @torch.no_grad()
    def step_ended(self, skip: Tensor) -> None:
        """Learn from `load`, the whole step's on all ranks. Where `skip` [] is 1, the step left no trace."""
        kept = skip == 0
        if self.bias is not None and self.weight.requires_grad:
            lacking = self.load.double().mean() - self.load
            self.bias.add_(lacking.sign().to(self.bias.dtype) * self.bias_rate * kept)
        if self.last_load is not None:
            self.last_load.copy_(torch.where(kept, self.load, self.last_load))
