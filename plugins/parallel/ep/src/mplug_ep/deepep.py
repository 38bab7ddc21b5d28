"""Tokens travel by DeepEP (https://github.com/deepseek-ai/DeepEP), version 2: its class `ElasticBuffer`.

N tokens of a rank, D embed, k experts per token, M tokens received. A token travels once to each rank that has one of
its experts, together with its gates; the sums that return are added up by DeepEP.

    function              forward                   backward
    TokenWay.send         `ElasticBuffer.dispatch`  `combine` of the gradients of tokens and gates
    TokenWay.give_back    `ElasticBuffer.combine`   `dispatch` of the gradient, with the handle of the first one
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import Run, UsageError
from mplug_ep.by_token import Arrived, Route
from mplug_ep.handle import pack, unpack
from mplug_nn import fake, operator

SETTING, REMEDY = "parallel.ep.dispatch=deepep", "use parallel.ep.dispatch=once_per_rank"
LIBRARY = "deep_ep"
NO_EXPERT = -1
"""The number of a dropped choice in DeepEP."""


class Buffer:
    """DeepEP's buffer of a group of ranks, made at the first call; its size grows with the number of tokens.

    All ranks must have the same number of tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.most, self.wide, self.k = 0, 0, 0
        self._elastic: Any = None
        self._kind: tuple[type[Any], tuple[str, ...]] | None = None

    def dispatch(self, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int) -> tuple[Any, ...]:
        """x [N, D], chosen [N, k], gates [N, k] -> (tokens [M, D], choices [M, k] among own experts, gates, handle)."""
        self._reserve(len(x), x.shape[1], chosen.shape[1])
        tokens, choices, arrived_gates, handle, _ = self._elastic.dispatch(
            x,
            topk_idx=chosen.masked_fill(chosen == num_experts, NO_EXPERT),
            topk_weights=gates,
            num_experts=num_experts,
            num_max_tokens_per_rank=self.most,
        )
        if self._kind is None:
            self._kind = type(handle), tuple(vars(handle))
        return tokens, choices, arrived_gates, handle

    def dispatch_again(self, x: Tensor, packed: Tensor, header: Tensor) -> Tensor:
        """x [N, D] to where the tokens of a handle have gone -> [M, D]."""
        tokens: Tensor = self._elastic.dispatch(x, handle=self._handle(packed, header))[0]
        return tokens

    def combine(self, x: Tensor, gates: Tensor | None, packed: Tensor, header: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [M, D], gates [M, k] -> their sums on the ranks of their tokens [N, D] and [N, k]."""
        y, summed, _ = self._elastic.combine(x, handle=self._handle(packed, header), topk_weights=gates)
        return y, summed

    def _handle(self, packed: Tensor, header: Tensor) -> Any:
        assert self._kind is not None
        return unpack(packed, header, *self._kind)

    def _reserve(self, tokens: int, width: int, k: int) -> None:
        if tokens <= self.most and width <= self.wide and k <= self.k:
            return
        self.most, self.wide, self.k = max(tokens, self.most), max(width, self.wide), max(k, self.k)
        elastic = import_module(LIBRARY).ElasticBuffer
        sizes = {"num_max_tokens_per_rank": self.most, "hidden": self.wide, "num_topk": self.k}
        self._elastic = elastic(self.group, **sizes, deterministic=True)


BUFFERS: dict[str, Buffer] = {}
"""Names of groups -> the buffer of the group."""


def open_buffer(run: Run, group: ops.Group) -> None:
    """Prepare the buffer of a group, or raise UsageError with the reason why this run cannot use DeepEP."""
    if find_spec(LIBRARY) is None:
        raise UsageError(
            f"{SETTING} needs the library DeepEP, and Python's package '{LIBRARY}' is not installed; install it from "
            f"https://github.com/deepseek-ai/DeepEP, or {REMEDY}"
        )
    if not hasattr(import_module(LIBRARY), "ElasticBuffer"):
        raise UsageError(
            f"{SETTING} needs version 2 of DeepEP, and the installed '{LIBRARY}' has no ElasticBuffer; install version "
            f"2, or {REMEDY}"
        )
    if not run.device.startswith("cuda"):
        raise UsageError(f"{SETTING} needs GPUs, and this run is on the CPU; {REMEDY}")
    if run.precision.activations != "bfloat16":
        word, format_ = run.config.trainer.precision, run.precision.activations
        raise UsageError(
            f"{SETTING} sends tokens in bf16, and trainer.precision={word} computes in {format_}; use "
            f"trainer.precision=bf16, or {REMEDY}"
        )
    if group is not None:
        BUFFERS[group.group_name] = Buffer(group)


class DeepEP:
    """A `TokenWay`. The CPU waits for the number of tokens."""

    length = 3

    def __init__(self, group: ops.Group) -> None:
        self.group = group

    def send(self, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int) -> Arrived:
        """Own choices that arrive are numbered from this rank's first expert on, as `Arrived` needs them."""
        assert self.group is not None
        first = self.group.rank() * (num_experts // self.group.size())
        sent: Any = _Send.apply(x, chosen, gates, num_experts, self.group.group_name)  # type: ignore[no-untyped-call]
        tokens, arrived_gates, choices, kept, packed, header = sent
        chosen = torch.where(choices == NO_EXPERT, num_experts, choices + first)
        back = (packed, header, chosen.new_empty(x.shape[0], 0))
        return Arrived(tokens, chosen, arrived_gates, kept.shape[0], back)

    def give_back(self, y: Tensor, back: Route) -> Tensor:
        """`ElasticBuffer.combine`."""
        assert self.group is not None
        packed, header, own = back
        summed: Tensor = _GiveBack.apply(y, packed, header, own.shape[0], self.group.group_name)  # type: ignore[no-untyped-call]
        return summed


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, group: str) -> Any:
        tokens, arrived_gates, choices, kept, packed, header = dispatch_tokens(x, chosen, gates, num_experts, group)
        ctx.save_for_backward(packed, header)
        ctx.shape, ctx.group = gates.shape, group
        ctx.mark_non_differentiable(choices, kept, packed, header)
        return tokens, arrived_gates, choices, kept, packed, header

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_gates: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        packed, header = ctx.saved_tensors
        grad_x, own_gates = combine_tokens_and_gates(grad, grad_gates, packed, header, *ctx.shape, ctx.group)
        return grad_x, None, own_gates, None, None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, packed: Tensor, header: Tensor, num_tokens: int, group: str) -> Tensor:
        ctx.save_for_backward(packed, header)
        ctx.arrived, ctx.group = y.shape[0], group
        return combine_tokens(y, packed, header, num_tokens, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return dispatch_again(grad, *ctx.saved_tensors, ctx.arrived, ctx.group), None, None, None, None


@operator("mplug_ep::dispatch_tokens")
def dispatch_tokens(
    x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> (tokens [M, D], gates [M, k], own choices [M, k], [their number], packed, header); see `handle.pack`."""
    buffer = BUFFERS[group]
    tokens, choices, arrived_gates, handle = buffer.dispatch(
        x.contiguous(), chosen.contiguous(), gates.contiguous(), num_experts
    )
    packed, header = pack(handle, x.device)
    kept = sum(handle.num_recv_tokens_per_expert_list)
    return tokens, arrived_gates, choices.to(chosen.dtype), chosen.new_empty(kept), packed, header


@fake("mplug_ep::dispatch_tokens")
def _(
    x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    number, kept, num_bytes, length = (context.new_dynamic_size() for _ in range(4))
    k = chosen.shape[1]
    return (
        x.new_empty(number, x.shape[1]),
        gates.new_empty(number, k),
        chosen.new_empty(number, k),
        chosen.new_empty(kept),
        x.new_empty(num_bytes, dtype=torch.uint8),
        chosen.new_empty(length, device="cpu", dtype=torch.int64),
    )


@operator("mplug_ep::dispatch_again")
def dispatch_again(x: Tensor, packed: Tensor, header: Tensor, num_arriving: int, group: str) -> Tensor:
    """x [N, D] -> [num_arriving, D], as the tokens of the packed handle."""
    tokens = BUFFERS[group].dispatch_again(x.contiguous(), packed, header)
    assert len(tokens) == num_arriving
    return tokens


@fake("mplug_ep::dispatch_again")
def _(x: Tensor, packed: Tensor, header: Tensor, num_arriving: int, group: str) -> Tensor:
    return x.new_empty(num_arriving, x.shape[1])


@operator("mplug_ep::combine_tokens")
def combine_tokens(x: Tensor, packed: Tensor, header: Tensor, num_tokens: int, group: str) -> Tensor:
    """x [M, D] -> the sums [num_tokens, D] for this rank's tokens."""
    return BUFFERS[group].combine(x.contiguous(), None, packed, header)[0]


@fake("mplug_ep::combine_tokens")
def _(x: Tensor, packed: Tensor, header: Tensor, num_tokens: int, group: str) -> Tensor:
    return x.new_empty(num_tokens, x.shape[1])


@operator("mplug_ep::combine_tokens_and_gates")
def combine_tokens_and_gates(
    x: Tensor, gates: Tensor, packed: Tensor, header: Tensor, num_tokens: int, k: int, group: str
) -> tuple[Tensor, Tensor]:
    """x [M, D], gates [M, k] -> the sums [num_tokens, D] and [num_tokens, k] for this rank's tokens."""
    y, summed = BUFFERS[group].combine(x.contiguous(), gates.contiguous(), packed, header)
    assert summed is not None
    return y, summed


@fake("mplug_ep::combine_tokens_and_gates")
def _(
    x: Tensor, gates: Tensor, packed: Tensor, header: Tensor, num_tokens: int, k: int, group: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(num_tokens, x.shape[1]), gates.new_empty(num_tokens, k)
