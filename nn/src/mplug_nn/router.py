"""The router of a mixture of experts, with the losses and the bias that balance the experts' load.

B batch, S sequence, D embed, E experts, k experts chosen by a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.inits import TOKENS, ZEROS, Entries, Inits
from mplug.layout.plan import Buffer, Parameter
from mplug.layout.work import Step, WeightProduct
from mplug.model.slots.declaration import Slot
from mplug.tensors.host_buffers import register_host_buffer
from mplug.tensors.sink import Weights, add_product
from mplug_nn.dropout import Jitter
from mplug_nn.linear import Gemm, multiply
from mplug_nn.scores import SCORES
from mplug_nn.statistics import add_auxiliary, count

if TYPE_CHECKING:
    from mplug_nn.first_bias import FirstBias

Score = str
"""A name of the open list `mplug.router_scores`: 'softmax', 'sigmoid', 'softmax_of_chosen', ..."""
ALL_EXPERTS = "router_expert"
"""The router's axis of experts: every rank holds all of it, even if the experts are split over ranks."""
Balance = Literal["none", "micro_batch", "sequence", "global_batch"]


def summed(values: Tensor, over: tuple[str, ...]) -> Tensor:
    """The default of the slot `Router.summed`: the identity, for a process that sees all of the named activation axes.

    values [...] (a statistic; no gradient flows through it) -> its sum over the ranks among which any axis in `over` is
    divided. The host fills this slot under every layout.
    """
    return values


def over_sequences(function: Callable[..., Tensor], *tensors: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The default of the slot `MixtureOfExperts.over_sequences`, for a process that has whole sequences.

    tensors [B, S, ...] (no gradient flows through them) -> function(*tensors) [B, S, ...]. The host fills this slot
    under every layout that divides the sequence: it calls the function with whole sequences and returns this rank's
    part of the result. A caller whose function depends on the order of positions gives the `lengths` [B, M] of the
    documents, or None if samples have none: ranks may divide samples by their documents.
    """
    return function(*tensors)


def balanced_scores(logits: Tensor, score: Score) -> Tensor:
    """What experts are chosen by in training if the score balances the load: the default of `Router.balanced_scores`.

    logits [B, S, E] of whole sequences (no gradient flows through them) -> [B, S, E], each sequence by itself.
    """
    function = SCORES[score].balanced
    assert function is not None, "a router calls the slot for such scores only"
    return function(logits)


BALANCED_SCORES = Slot("Router.balanced_scores", "balance", balanced_scores)
SUMMED = Slot("Router.summed", "router", summed, sums_tokens=True)


OVER_SEQUENCES = Slot("MixtureOfExperts.over_sequences", "router", over_sequences, joins_sequences=True)


@dataclass(frozen=True)
class Gating:
    """How a token's experts are chosen, and how they are weighted.

    `score` turns logits into scores. The `top_k` experts with the highest scores are chosen. With `num_groups` > 1,
    only the experts of the `top_groups` best groups compete; a group's score is the sum of its `group_best` best scores
    (2: arXiv 2412.19437, section 2.1.2; 1: arXiv 2405.04434, section 2.2.2). Gates are the scores of the chosen experts
    times `scale`. If `normalize` is true, the scores are first divided by their sum; a single gate is then `scale`.
    In training, a score that balances the load (`RouterScore.balanced`) chooses by other values than by scores.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    group_best: int = 2

    def scores(self, logits: Tensor) -> Tensor:
        """logits [..., E] -> scores [..., E]."""
        return SCORES[self.score].judged(logits)

    @property
    def balances(self) -> bool:
        """Whether experts are chosen in training by other values than scores, from the logits of whole sequences."""
        return SCORES[self.score].balanced is not None

    def probabilities(self, scores: Tensor) -> Tensor:
        """scores [..., E] -> [..., E] with sum 1, for the balancing loss."""
        return SCORES[self.score].probabilities(scores)

    def chosen(self, scores: Tensor) -> Tensor:
        """scores [..., E] -> the numbers of the chosen experts [..., k], the best first."""
        if self.num_groups > 1:
            grouped = scores.unflatten(-1, (self.num_groups, -1))  # [..., G, E / G]
            worth = grouped.topk(min(self.group_best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            best = torch.zeros_like(worth, dtype=torch.bool)
            best = best.scatter(-1, worth.topk(self.top_groups, dim=-1).indices, True)
            scores = grouped.masked_fill(~best[..., None], float("-inf")).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    def gates(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The gates [..., k] of the chosen experts."""
        gates = SCORES[self.score].gates(scores.gather(-1, chosen))
        if self.normalize:
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
"""Products with fp32 logits in any precision (arXiv 2101.03961, section 2.4); backward's saved tensors stay narrow."""


class Router(nn.Module):
    """Chooses each token's experts. Auxiliary losses and a bias keep the experts' load even.

    The balancing loss (arXiv 2101.03961, equations 4 to 6) is `balance_coefficient` * E sum_i f_i P_i, where P_i is the
    mean of p_ni over the tokens n, and p_n are the token's scores, normalised to sum 1. The tokens are all positions of
    the global batch: with or without a target, and padding too, because all of them are routed and computed. f_i is the
    share of expert i in the choices of all tokens that the loss covers; it carries no gradient. `balance` selects these
    tokens:

        sequence      the tokens of the same sequence, whole under any layout       (arXiv 2412.19437, section 2.1.2)
        micro_batch   the tokens of a micro batch: whole sequences of one data-parallel rank. Depends on its size
        global_batch  the tokens of the previous step's global batch, because the shares of a step are known only
                      at its end. In the first step, the shares are even

    The z-loss (arXiv 2202.08906, equation 5), `z_coefficient` times the mean over the same tokens of
    (log sum_i exp z_ni)², depends only on the token itself.

    A micro batch adds its sums over tokens. The model's loss is divided by the number of targets at the end of a step,
    and these sums with it; so they have the factor targets / tokens of the global batch (`token_scale`).

    With `logit_bias`, a trained bias is added to the logits.

    `bias` [E] balances without a loss (arXiv 2408.15664). It is added to the scores when experts are chosen, not to the
    gates. After each step it rises by `bias_rate` for experts whose load in the global batch was below the mean, and
    falls by `bias_rate` for those above the mean. It does not change if the router is frozen.

    Buffers, which a model's plan describes. Statistics: `load` [E], how often each expert was chosen in a step;
    `losses` [2], the step's sums of E sum_i f_i p_ni and of the z-loss, both without their coefficients, reported per
    token. States: `bias`
    [E] (if `choice_bias`, or if that is None and `bias_rate` > 0) and `last_load` [E] (if `balance` is 'global_batch').
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (SUMMED, OVER_SEQUENCES, BALANCED_SCORES)
    load: Tensor
    losses: Tensor
    token_scale: Tensor
    bias: Tensor | None
    last_load: Tensor | None
    first_bias: "FirstBias | None"
    """The bias with which the run began, if an objective recalls the first weights."""

    def __init__(
        self,
        dim: int,
        gating: Gating,
        *,
        balance: Balance = "none",
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        bias_rate: float = 0.0,
        jitter: float = 0.0,
        logit_bias: bool = False,
        choice_bias: bool | None = None,
    ) -> None:
        super().__init__()
        SCORES.load(gating.score)
        self.gating, self.balance, self.bias_rate = gating, balance, bias_rate
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        experts = gating.num_experts
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.logit_bias = nn.Parameter(torch.empty(experts)) if logit_bias else None
        self.jitter = Jitter(jitter)
        self.first_bias = None
        self.summed: Callable[[Tensor, tuple[str, ...]], Tensor] = summed
        self.over_sequences: Callable[..., Tensor] = over_sequences
        self.balanced_scores: Callable[..., Tensor] = balanced_scores
        self.register_buffer("load", torch.zeros(experts, dtype=torch.float64), persistent=False)
        self.register_buffer("losses", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.adds_loss = bool(z_coefficient or (balance != "none" and balance_coefficient))
        if self.adds_loss:
            register_host_buffer(self, "token_scale", "token scale")
        biased = bias_rate > 0 if choice_bias is None else choice_bias
        if biased and gating.balances:
            raise ValueError(
                f"the score '{gating.score}' chooses experts by values that balance their load, and a bias of the "
                f"choice (expert_bias, expert_bias_rate) would change no choice in training; use one of the two"
            )
        self.register_buffer("bias", torch.zeros(experts) if biased else None)
        last_load = torch.zeros(experts, dtype=torch.float64) if balance == "global_batch" else None
        self.register_buffer("last_load", last_load)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the weight and of the buffers."""
        state = Buffer((ALL_EXPERTS,))
        return {
            "weight": Parameter((ALL_EXPERTS, "embed"), inits.weight),
            **({} if self.logit_bias is None else {"logit_bias": Parameter((ALL_EXPERTS,), ZEROS)}),
            "load": Buffer((ALL_EXPERTS,), over=TOKENS),
            "losses": Buffer(("loss",), over=TOKENS, per_token=True),
            **({} if self.bias is None else {"bias": state}),
            **({} if self.last_load is None else {"last_load": state}),
        }

    def plan_work(self) -> Step:
        """The product with the weight, and what is added to it."""
        return (WeightProduct("weight", self.weight.numel()), *(() if self.logit_bias is None else ("logit_bias",)))

    @property
    def mixes(self) -> frozenset[str]:
        """`batch` if the loss covers a micro batch. The sum over positions runs in a slot, so it does not count.

        Only training computes the loss.
        """
        return frozenset({"batch"} if self.balance == "micro_batch" and self.training else ())

    @property
    def varies(self) -> str:
        """What depends on the layout; empty if nothing does."""
        if self.balance == "micro_batch":
            return "the balancing loss covers a micro batch, and trainer.micro_batch_size says what is in one"
        return ""

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], positions [1 or B, S], the samples' keys [B] -> chosen [B, S, k] int64, gates [B, S, k] fp32."""
        x = self.jitter(x, keys, positions)
        logits = multiply(x, Weights.of(self.weight), WIDE)  # [B, S, E]
        logits = logits if self.logit_bias is None else logits + self.logit_bias.to(logits.dtype)
        scores = self.gating.scores(logits)
        chosen = self.gating.chosen(self._judged(logits.detach(), scores.detach()))
        gates = self.gating.gates(scores, chosen)
        return chosen, self._balanced(gates, logits, scores, chosen) if self.training else gates

    def _judged(self, logits: Tensor, scores: Tensor) -> Tensor:
        """What experts are chosen by [B, S, E]."""
        if self.training and self.gating.balances:
            return self.over_sequences(partial(self.balanced_scores, score=self.gating.score), logits)
        return scores if self.bias is None else scores + self.bias

    def _balanced(self, gates: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """The gates [B, S, k], through which the auxiliary losses enter backward; this also adds to the statistics."""
        counts = self._counts(chosen)  # [B, E]
        z_loss = logits.logsumexp(dim=-1).square().sum()
        uneven = torch.zeros_like(z_loss) if self.balance == "none" else self._uneven(scores, counts)
        count(self.load, counts.sum(dim=0))
        count(self.losses, torch.stack((uneven, z_loss)).detach().to(self.losses.dtype))
        loss = self.balance_coefficient * uneven + self.z_coefficient * z_loss
        return add_auxiliary(gates, loss, self.token_scale) if self.adds_loss and loss.requires_grad else gates

    def _uneven(self, scores: Tensor, counts: Tensor) -> Tensor:
        """E sum_n sum_i f_i p_ni; equal to the number of tokens if all experts are chosen equally often."""
        probabilities = self.gating.probabilities(scores)
        shares = self._shares(counts).to(probabilities.dtype)
        return (shares[:, None] * probabilities).sum() * self.gating.num_experts

    def _counts(self, chosen: Tensor) -> Tensor:
        """How often each expert was chosen in each sample [B, E], in the positions of this rank."""
        samples, experts = len(chosen), self.gating.num_experts
        places = chosen.flatten(1) + experts * torch.arange(samples, device=chosen.device)[:, None]
        zeros = torch.zeros(samples * experts, dtype=torch.int64, device=chosen.device)
        return zeros.scatter_add(0, places.flatten(), torch.ones_like(places).flatten()).view(samples, experts)

    def _shares(self, counts: Tensor) -> Tensor:
        """f, each expert's share in the choices that the loss covers: [B or 1, E], fp64."""
        if self.balance == "global_batch":
            assert self.last_load is not None
            known = self.last_load + (self.last_load.sum() == 0)
            return (known / known.sum())[None]
        counts = self.summed(counts, ("sequence",))
        counts = counts if self.balance == "sequence" else counts.sum(dim=0, keepdim=True)
        return counts.double() / counts.sum(dim=-1, keepdim=True)

    @torch.no_grad()
    def step_ended(self, skip: Tensor) -> None:
        """Update `bias` and `last_load` from `load`, the sum of the whole step over all ranks.

        If `skip` [] is 1, the step was skipped and nothing changes.
        """
        kept = skip == 0
        if self.bias is not None and self.weight.requires_grad:
            lacking = self.load.double().mean() - self.load
            self.bias.add_(lacking.sign().to(self.bias.dtype) * self.bias_rate * kept)
        if self.last_load is not None:
            self.last_load.copy_(torch.where(kept, self.load, self.last_load))

    def keep_first(self) -> None:
        """Keep the bias with which the run begins."""
        if self.first_bias is not None and self.bias is not None:
            self.first_bias.keep(self.bias)

    def exchange_first(self) -> None:
        """Exchange the bias and the first one, for a pass with the first weights, and again after it."""
        if self.first_bias is not None and self.bias is not None:
            self.first_bias.exchange(self.bias)
