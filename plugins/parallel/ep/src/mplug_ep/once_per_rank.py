"""A token travels once to each rank that has any of its experts, by messages.

N tokens of a rank, D embed, k experts per token, R ranks, L = N min(k, R) places for copies of tokens that leave, M
tokens received.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_ep.by_token import Arrived, Route
from mplug_nn import fake, operator
from mplug_ops.transfers import group_named


class Copies(NamedTuple):
    """Where the copies of tokens are that leave, in the order of the receiving ranks.

    `token` [L]: the token of each copy; those after the first `total` [] are not sent. `places` [N, k]: the place of
    each choice's copy, not below `total` if an earlier choice of the token has the same rank.
    """

    token: Tensor
    places: Tensor
    total: Tensor


class OncePerRank:
    """A `TokenWay`. Beside each token travel its k gates and choices. The CPU waits for the number of tokens."""

    length = 5

    def __init__(self, group: ops.Group) -> None:
        self.group = group

    def send(self, x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int) -> Arrived:
        """Copies of tokens leave in the order of their ranks, as rows of experts are ordered by expert."""
        assert self.group is not None
        size = self.group.size()
        owner = chosen // (num_experts // size)  # [N, k]; R for a dropped choice
        copies, counts = copies_of(owner, size)
        choices = (owner.flatten() == torch.arange(size, device=owner.device)[:, None]).sum(dim=1)  # [R]
        arriving, kept, sizes = meet_tokens(torch.stack((counts, choices), dim=1), self.group.group_name)
        meeting = self._meeting(copies.total, arriving, sizes)
        details = torch.cat((gates, chosen.to(gates.dtype)), dim=1)  # [N, 2 k]
        tokens, of_tokens = (ops.send(_Copy.apply(one, *copies), meeting, self.group) for one in (x, details))  # type: ignore[no-untyped-call]
        arrived_gates, arrived_chosen = of_tokens.chunk(2, dim=1)
        back = (*copies, arriving, sizes)
        return Arrived(tokens, arrived_chosen.detach().to(chosen.dtype), arrived_gates, kept.shape[0], back)

    def give_back(self, y: Tensor, back: Route) -> Tensor:
        """The ranks' sums return, at most one per token and rank, and are added up."""
        *copies, arriving, sizes = back
        meeting = self._meeting(copies[2], arriving, sizes)
        returned = ops.give_back(y, meeting, copies[0].shape[0], self.group)
        summed: Tensor = _Sum.apply(returned, *copies)  # type: ignore[no-untyped-call]
        return summed

    def _meeting(self, total: Tensor, arriving: Tensor, sizes: Tensor) -> ops.Meeting:
        """A meeting of one bin: the rows keep the order of their arrival."""
        return ops.Meeting(total[None], arriving, arriving, sizes)


def copies_of(owner: Tensor, size: int) -> tuple[Copies, Tensor]:
    """owner [N, k], the ranks of the choices (`size`: none) -> (the copies that leave, counts [R] for each rank)."""
    tokens, k = owner.shape
    earlier = torch.ones(k, k, dtype=torch.bool, device=owner.device).tril(-1)
    repeated = ((owner[:, :, None] == owner[:, None, :]) & earlier).any(dim=2)
    rank, order = owner.masked_fill(repeated, size).flatten().sort(stable=True)
    starts = torch.searchsorted(rank, torch.arange(size + 1, device=owner.device))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=owner.device))
    return Copies(order[: tokens * min(k, size)] // k, places.view_as(owner), starts[-1]), starts.diff()


class _Copy(torch.autograd.Function):
    """rows[l] = x[token[l]]; backward: grad_x[n] = sum_j grad_rows[places[n, j]] without places from `total` on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, places: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(places, total)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, *ctx.saved_tensors), None, None, None


class _Sum(torch.autograd.Function):
    """y[n] = sum_j rows[places[n, j]] without places from `total` on; backward: grad_rows[l] = grad_y[token[l]]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, places: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _summed(rows, places, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None, None


def _summed(rows: Tensor, places: Tensor, total: Tensor) -> Tensor:
    """The sums [N, D] of rows [L, D] at places [N, k], in fp32 at least."""
    at = places.flatten().clamp(max=rows.shape[0] - 1)
    picked = rows.index_select(0, at).view(*places.shape, rows.shape[1]).where((places < total)[..., None], 0)
    wide = picked.sum(dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    # Compiled by torch 2.11, a tensor that `to` returns unchanged has a zero gradient (pytorch issue 180642).
    return wide if wide.dtype == rows.dtype else wide.to(rows.dtype)


@operator("mplug_ep::meet_tokens")
def meet_tokens(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """counts [R, 2]: the tokens and the choices of this rank for each rank -> ([M], [choices], sizes [2, R]).

    Only the lengths of the first two results have a meaning: the numbers of tokens and of choices that this rank
    receives. `sizes`, on the CPU, are the numbers of tokens sent to and received from each rank. The CPU waits for the
    device.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group_named(group))
    on_cpu = torch.stack((counts, received)).cpu()  # [2, R, 2]
    tokens, choices = on_cpu[1].sum(dim=0).tolist()
    return counts.new_empty(tokens), counts.new_empty(choices), on_cpu[..., 0].contiguous()


@fake("mplug_ep::meet_tokens")
def _(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    lengths = (counts.new_empty(context.new_dynamic_size()) for _ in range(2))
    return *lengths, counts.new_empty((2, counts.shape[0]), device="cpu")  # type: ignore[return-value]
