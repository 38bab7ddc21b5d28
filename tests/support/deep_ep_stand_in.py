"""A stand-in for DeepEP on CPUs: the documented API of its class `ElasticBuffer` (version 2), by collectives of torch.

N tokens of a rank, D embed, k choices of a token, M tokens received, E experts. What DeepEP leaves open is hostile
here: tokens arrive in the order of their ranks backwards, and bring the weights of other ranks' experts too.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_ep import wraps
from mplug_ep.deepep import BUFFERS, Buffer
from torch import Tensor

from mplug.run.run import Run


class EPHandle:
    """Attributes of DeepEP's handle: numbers, lists, tensors and None."""

    def __init__(self, topk_idx: Tensor, num_experts: int, source: Tensor, counts: list[int], most: int) -> None:
        self.do_expand = False
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = most
        self.topk_idx = topk_idx.clone()
        self.num_recv_tokens = len(source)
        self.num_recv_tokens_per_expert_list = counts
        self.recv_src_metadata = source.to(torch.int32)
        self.channel_linked_list = None


class ElasticBuffer:
    """`dispatch` and `combine`, with the arguments that mplug gives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        deterministic: bool = False,
    ) -> None:
        self.group, self.most, self.hidden, self.k = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        handle: EPHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, Any]:
        """-> (tokens [M, D], choices [M, k] among own experts or -1, weights [M, k], handle, event)."""
        assert (topk_idx is None) == (handle is not None)
        assert len(x) <= self.most, "a buffer that is too small"
        assert x.is_contiguous()
        every = self._all((x.detach(), topk_idx, topk_weights))
        if handle is not None:
            rows = [every[rank][0][number] for rank, number in handle.recv_src_metadata.tolist()]
            return torch.stack(rows) if rows else x.new_empty(0, x.shape[1]), None, None, handle, None
        assert num_experts is not None
        assert num_max_tokens_per_rank == self.most
        assert topk_idx is not None
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        assert topk_idx.shape[1] <= self.k
        each = num_experts // self.group.size()
        first = each * self.group.rank()
        rows, choices, weights, source = [], [], [], []
        for rank in reversed(range(self.group.size())):
            tokens, chosen, given = every[rank]
            own = (chosen >= first) & (chosen < first + each)
            for number in own.any(dim=1).nonzero().flatten().tolist():
                rows.append(tokens[number])
                choices.append((chosen[number] - first).where(own[number], -1))
                weights.append(given[number])
                source.append((rank, number))
        k = topk_idx.shape[1]
        found = torch.stack(choices) if choices else topk_idx.new_empty(0, k)
        counts = [int((found == expert).sum()) for expert in range(each)]
        handle = EPHandle(topk_idx, num_experts, torch.tensor(source).view(-1, 2), counts, self.most)
        arrived = torch.stack(rows) if rows else x.new_empty(0, x.shape[1])
        assert topk_weights is not None
        given_weights = torch.stack(weights) if weights else topk_weights.new_empty(0, k)
        return arrived, found, given_weights, handle, None

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """x [M, D] and weights [M, k] -> the sums [N, D] and [N, k] on the ranks of their tokens."""
        assert len(x) == handle.num_recv_tokens == len(handle.recv_src_metadata)
        tokens, k = handle.topk_idx.shape
        y = x.new_zeros(tokens, x.shape[1])
        summed = None if topk_weights is None else topk_weights.new_zeros(tokens, k)
        for rows, source, weights in self._all((x.detach(), handle.recv_src_metadata, topk_weights)):
            own = source[:, 0] == self.group.rank()
            y.index_add_(0, source[own, 1].long(), rows[own])
            if summed is not None:
                summed.index_add_(0, source[own, 1].long(), weights[own])
        return y, summed, None

    def _all(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, own, group=self.group)
        return found


def install(buffer: type = ElasticBuffer, patch: pytest.MonkeyPatch | None = None) -> None:
    """Make `import deep_ep` return a module with a class in this process, for a test or for good."""
    module = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", None)
    setattr(module, buffer.__name__, buffer)
    if patch is None:
        sys.modules["deep_ep"] = module
    else:
        patch.setitem(sys.modules, "deep_ep", module)


def open_stand_in(run: Run, group: Any) -> None:
    """In place of `mplug_ep.deepep.open_buffer`, which requires a GPU."""
    install()
    if group is not None:
        BUFFERS[group.group_name] = Buffer(group)


def by_stand_in() -> None:
    """Let `parallel.ep.dispatch=deepep` use the stand-in in this process."""
    wraps.open_buffer = open_stand_in
