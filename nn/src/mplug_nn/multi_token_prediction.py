"""Multi-token prediction (MTP, arXiv 2412.19437, section 2.2): a training loss on tokens further ahead.

B batch, S sequence, D embed, V vocabulary, K depths.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.plan import Buffer, Parameter
from mplug.layout.work import Step, WeightProduct
from mplug.model.plans.work import in_order
from mplug.tensors.host_buffers import register_host_buffer
from mplug_nn.embedding import Embedding
from mplug_nn.head import Head
from mplug_nn.linear import Linear
from mplug_nn.norm import Norm
from mplug_nn.statistics import add_auxiliary, count


class DepthAhead(nn.Module):
    """One depth: block(merge([token_norm(embeddings), hidden_norm(hidden)])), and a norm of the result."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, norms: tuple[Norm, Norm, Norm], block: nn.Module) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.norm = norms
        self.merge = Linear(2 * dim, dim, bias=False)
        self.block = block

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the projection; the norms and the block describe themselves."""
        return {"merge.weight": Parameter(("embed", "merged"), inits.weight)}

    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None
    ) -> Tensor:
        """hidden and embedded [B, S, D] -> [B, S, D]."""
        merged = torch.cat((self.token_norm(embedded)[0], self.hidden_norm(hidden)[0]), dim=-1)
        optional = {} if document_lengths is None else {"document_lengths": document_lengths}
        y: Tensor = self.norm(self.block(self.merge(merged), positions, keys, **optional))[0]
        return y


class TokensAhead(nn.Module):
    """A unit between the last block and the head: it returns its input, and adds a loss to backward.

    Depth k = 1 ... K takes the normalised output of depth k - 1 (of the last block at first) and the embeddings of the
    tokens that are k positions ahead. Its loss is the cross-entropy of the labels k positions ahead, by the head's
    projection. The losses are sums over tokens, like the model's loss; `coefficient` / K times their sum enters
    backward, and the host divides it by the same global number of targets. This is the paper's mean (equations 24 and
    25): it divides every depth by T, the length of the sequence, although depth k has k targets fewer. With masked
    labels, T is the number of targets of the model's loss. The embedding table, the head's norm and the
    head's projection are those of the model: tied parameters.

    The entries 'tokens_k' and 'labels_k', and 'loss_weights_k' if losses have weights, are shifted over whole
    sequences, before a strategy divides them. Evaluation and inference skip the unit. The buffer `losses` [K] reports
    each depth's loss, without the coefficient, per target.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot
    losses: Tensor
    loss_scale: Tensor

    def __init__(self, embedding: Embedding, head: Head, depths: Sequence[DepthAhead], coefficient: float) -> None:
        super().__init__()
        vocab_size, dim = embedding.weight.shape
        self.coefficient = coefficient
        self.token = Embedding(vocab_size, dim)
        self.head = Head(Norm(dim, head.norm.kind, head.norm.eps, head.norm.bias is not None), dim, vocab_size)
        self.head.scale = head.scale
        self.head.soft_cap = self.head.loss.soft_cap = head.soft_cap
        self.depths = nn.ModuleList(depths)
        self.register_buffer("losses", torch.zeros(len(depths), dtype=torch.float64), persistent=False)
        register_host_buffer(self, "loss_scale", "loss scale")
        self.tie(embedding, head)

    def tie(self, embedding: Embedding, head: Head) -> None:
        """Use the parameters of the model's embedding and head."""
        self.token.weight = embedding.weight
        self.head.project.weight = head.project.weight
        self.head.norm.weight, self.head.norm.bias = head.norm.weight, head.norm.bias

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the statistic."""
        return {"losses": Buffer(("depth",), over=TOKENS, per_target=True)}

    def plan_work(self) -> Step:
        """The submodules in order; every depth multiplies by the head's projection, which states the product once."""
        more = (len(self.depths) - 1) * self.head.project.weight.numel()
        return (*in_order(self), *((WeightProduct("head.project.weight", more),) if more else ()))

    def blocks(self) -> list[nn.Module]:
        """The blocks of all depths."""
        return [depth.get_submodule("block") for depth in self.depths]

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        keys: Tensor,
        *ahead: Tensor,
        document_lengths: Tensor | None = None,
        **weights: Tensor,
    ) -> Tensor:
        """hidden [B, S, D], `ahead`: tokens and labels [B, S] of each depth in turn -> hidden.

        `weights`: those of the losses of each depth in turn [B, S], if losses have some.
        """
        if not self.training:
            return hidden
        h = self.head.norm(hidden)[0]
        losses: list[Tensor] = []  # a call of `list[Tensor]` cannot be traced
        of_depth = weights.values() if weights else [None] * len(self.depths)
        for depth, tokens, labels, of_labels in zip(self.depths, ahead[::2], ahead[1::2], of_depth, strict=True):
            h = depth(h, self.token(tokens), positions, keys, document_lengths)
            losses.append(self.head.loss_of(h, labels, of_labels)[0])
        each = torch.stack(losses)
        # Sequence parallelism gathers the sequence before the loss, so several ranks know the same sum.
        share = hidden.shape[1] / ahead[1].shape[1]
        count(self.losses, each.detach().to(self.losses.dtype) * share)
        loss = self.coefficient / len(losses) * each.sum()
        return add_auxiliary(hidden, loss, self.loss_scale) if loss.requires_grad else hidden
