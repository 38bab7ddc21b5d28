"""Accumulate the results of the parts of attention, in fp32 or wider, and hand their gradients to autograd.

B batch, S queries, T keys, H query heads, G KV heads, K head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mplug_cp.blocks import Block, Sight
from mplug_cp.documents import lengths_in, places_in
from mplug_nn.parts import AttentionParts


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which parts are summed: that of x, but at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class Seen:
    """What a query sees: by position, and by the document lengths [B, M] and groups [B, S] of whole samples, if any."""

    sight: Sight
    scale: float
    documents: Tensor | None = None
    groups: Tensor | None = None

    def of(self, block: Block) -> dict[str, Any]:
        """What a call of a part receives beside its tensors."""
        return {
            "scale": self.scale,
            "causal": block.causal,
            "lengths": lengths_in(self.documents, block),
            "places": places_in(self.groups, block, self.sight),
        }


class Forward:
    """The output and log-sum-exp of this rank's queries over the parts added so far.

    The first part must cover all queries, and each query must see at least one of its keys.
    """

    def __init__(self, parts: AttentionParts, q: Tensor, seen: Seen, sinks: Tensor | None = None) -> None:
        self.parts, self.q, self.seen, self.sinks = parts, q, seen, sinks
        self.output: Tensor | None = None

    def add(self, block: Block, k: Tensor, v: Tensor) -> None:
        """Compute a part and merge it; `block.keys` selects its keys and values in k and v [B, *, G, K]."""
        q, k, v = self.q[:, block.queries], k[:, block.keys], v[:, block.keys]
        output, sums = self.parts.forward(q, k, v, **self.seen.of(block))
        if self.output is None:
            self.output, self.sums = output, sums.clone()
            return
        self._widen()
        merge(self.output[:, block.queries], self.sums[:, :, block.queries], output, sums)

    def result(self) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S]), contiguous; both include the attention sinks."""
        assert self.output is not None
        if self.sinks is not None:
            self._widen()
            self.sums = weigh_with_sinks(self.output, self.sums, self.sinks)
        return self.output.to(self.q.dtype).contiguous(), self.sums.contiguous()

    def _widen(self) -> None:
        assert self.output is not None
        self.output = self.output.to(wide(self.q))


def weigh_with_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp [B, H, S] with the sinks [H]; they take weight from the output [B, S, H, K], in place."""
    together = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    output.mul_((sums - together).exp().transpose(1, 2)[..., None])
    return together


def gradient_of_sinks(sinks: Tensor | None, grad: Tensor, output: Tensor, sums: Tensor) -> Tensor:
    """The gradient [H] of sinks, which have no value, from those of a rank's queries; empty without sinks."""
    if sinks is None:
        return output.new_empty(0)
    inner = (output.to(sums.dtype) * grad.to(sums.dtype)).sum(dim=-1).transpose(1, 2)  # [B, H, S]
    weights = (sinks.to(sums.dtype)[:, None] - sums).exp()
    return -(weights * inner).sum(dim=(0, 2)).to(sinks.dtype)


def merge(total: Tensor, total_sums: Tensor, output: Tensor, sums: Tensor) -> None:
    """Merge a part into a total in place: outputs [B, S, H, K], weighted by exponentials of log-sum-exps [B, H, S]."""
    together = torch.logaddexp(total_sums, sums)
    kept, added = ((x - together).exp().transpose(1, 2)[..., None] for x in (total_sums, sums))  # [B, S, H, 1]
    total.mul_(kept).addcmul_(output.to(total.dtype), added)
    total_sums.copy_(together)


class Backward:
    """The gradients of q, k and v; each part's share follows from the output and log-sum-exp of the whole."""

    def __init__(
        self,
        parts: AttentionParts,
        grad: Tensor,
        q: Tensor,
        output: Tensor,
        sums: Tensor,
        seen: Seen,
        sinks: Tensor | None = None,
    ) -> None:
        self.parts, self.grad, self.q, self.output, self.sums = parts, grad, q, output, sums
        self.seen, self.sinks = seen, sinks
        self.dq = torch.zeros(q.shape, dtype=wide(q), device=q.device)

    def of(self, block: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients (dk, dv) of a part's keys and values, [B, T, G, K] each; its dq is added to `self.dq`."""
        queries = block.queries
        dq, dk, dv = self.parts.backward(
            self.grad[:, queries],
            self.q[:, queries],
            k[:, block.keys],
            v[:, block.keys],
            self.output[:, queries],
            self.sums[:, :, queries],
            **self.seen.of(block),
        )
        self.dq[:, queries] += dq
        return dk, dv

    def result(self) -> tuple[Tensor, Tensor]:
        """(dq [B, S, H, K], the gradient of the attention sinks [H]: of this rank's queries; empty without sinks)."""
        return self.dq.to(self.q.dtype), gradient_of_sinks(self.sinks, self.grad, self.output, self.sums)


def add_to(total: Tensor, block: Block, gradients: tuple[Tensor, Tensor]) -> None:
    """Add a part's (dk, dv) to its positions in `total`, the gradient of stacked keys and values [2, B, *, G, K]."""
    for sum_, gradient in zip(total, gradients, strict=True):
        sum_[:, block.keys] += gradient
