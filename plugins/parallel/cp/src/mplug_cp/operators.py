"""Methods of attention by parts as torch operators: a compiled graph has one node for each.

B batch, S local length, H query heads, G KV heads, K head dim, M documents of a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug_cp.blocks import Sight
from mplug_cp.totals import Seen, wide
from mplug_nn.parts import AttentionParts

Operator = Callable[..., tuple[Tensor, ...]]
ARGUMENTS = "Tensor? documents, Tensor? groups, Tensor? sinks, float scale, bool causal, int? window, str group"


@dataclass(frozen=True)
class Call:
    """The arguments of an operator after q, k and v.

    The lengths of documents [B, M] and groups of positions [B, S] of whole samples, attention sinks [H], and the name
    of the process group.
    """

    documents: Tensor | None
    groups: Tensor | None
    sinks: Tensor | None
    scale: float
    causal: bool
    window: int | None
    group: str

    @property
    def sight(self) -> Sight:
        """What a query sees by its position."""
        return Sight(self.causal, self.window, self.groups is not None)

    @property
    def seen(self) -> Seen:
        """What a query sees."""
        return Seen(self.sight, self.scale, self.documents, self.groups)


Attend = Callable[[AttentionParts, Tensor, Tensor, Tensor, Call], tuple[Tensor, ...]]
"""(parts, q [B, S, H, K], k and v [B, S, G, K], call) -> (output [B, S, H, K], log-sum-exp [B, H, S], kept keys)."""
Differentiate = Callable[
    [AttentionParts, Tensor, Tensor, Sequence[Tensor], Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor, Tensor]
]
"""(parts, grad, q, keys, output, log-sum-exp, call) -> (dq, dk and dv [B, S, G, K], the sinks' gradient).

`keys` are the kept keys of the forward pass, or k and v if it keeps none.
"""


def operator_of(
    name: str, parts: AttentionParts, attend: Attend, differentiate: Differentiate, keeps: int = 0
) -> Operator:
    """The operator of a method, built from a supplier's parts; `name` is unique among the operators of the process.

    Its arguments are q, k and v and the fields of `Call`; it returns what `attend` returns. Only the output is
    differentiable. `keeps`: the number of kept tensors, keys and values [2, B, S, G, K] each.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return attend(parts, q, k, v, Call(*rest))

    def backward(
        grad: Tensor, q: Tensor, keys: list[Tensor], output: Tensor, sums: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        return differentiate(parts, grad, q, keys, output, sums, Call(*rest))

    results = ", ".join(["Tensor"] * (2 + keeps))
    of_forward: Any = torch.library.custom_op(
        f"mplug_cp::{name}",
        forward,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> ({results})",
    )
    of_backward: Any = torch.library.custom_op(
        f"mplug_cp::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad, Tensor q, Tensor[] keys, Tensor output, Tensor sums, {ARGUMENTS}) "
        f"-> (Tensor, Tensor, Tensor, Tensor)",
    )
    of_forward.register_fake(partial(_shapes, keeps))
    of_backward.register_fake(partial(_backward_shapes, keeps))
    of_forward.register_autograd(_differentiated(of_backward), setup_context=_keep)
    operator: Operator = of_forward
    return operator


def _shapes(keeps: int, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, s, h, _ = q.shape
    kept = (k.new_empty((2, *k.shape)) for _ in range(keeps))
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide(q)), *kept


def _backward_shapes(keeps: int, grad: Tensor, q: Tensor, keys: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[4]  # after output, sums, documents and groups
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    shape = keys[0].shape[1:] if keeps else keys[0].shape
    return grad.new_empty(q.shape), keys[0].new_empty(shape), keys[0].new_empty(shape), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, groups, sinks, *ctx.rest = inputs
    mixed, sums, *kept = output
    keys = kept or [k, v]
    ctx.num_keys = len(keys)
    ctx.save_for_backward(q, mixed, sums, documents, groups, sinks, *keys)


def _differentiated(backward: Operator) -> Callable[..., tuple[Tensor | None, ...]]:
    """What autograd calls for an operator, given the operator of its backward pass."""

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, output, sums, documents, groups, sinks, *keys = ctx.saved_tensors  # recomputation refuses a second access
        *of_heads, of_sinks = backward(grad, q, keys, output, sums, documents, groups, sinks, *ctx.rest)
        return *of_heads, None, None, None if sinks is None else of_sinks, None, None, None, None

    return differentiate
