"""Heads for classes and for embeddings. B batch, S sequence, D embed, M documents of a sample, C classes, N pairs."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mplug import IGNORED, Entries, Init, Inits, Parameter, Segment
from mplug.tensors.segments import numbered
from mplug_nn import Activation, Dropout, Linear, Loss, Norm

ZEROS = Init("constant", value=0.0)


class DocumentMean(nn.Module):
    """The mean over the positions of each document, at every position of the document."""

    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})

    def forward(self, x: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], lengths [B, M] -> [B, S, D]; without lengths, a sample is one document."""
        if document_lengths is None:
            return x.mean(dim=1, keepdim=True).expand_as(x)
        members = _members(document_lengths, x)  # [B, S, M]
        return members @ _means(x, members)


def _members(lengths: Tensor, x: Tensor) -> Tensor:
    """Whether a position [B, S] belongs to a document [M], as numbers like x: a product sums in a fixed order."""
    documents = torch.arange(lengths.shape[1], device=x.device)
    return (numbered(lengths, x.shape[1])[..., None] == documents).to(x.dtype)


def _means(x: Tensor, members: Tensor) -> Tensor:
    """x [B, S, D], members [B, S, M] -> the means of documents [B, M, D]; zeros for an empty document."""
    return (members.mT @ x) / members.sum(dim=1).clamp(min=1)[..., None]


class ClassHead(nn.Module):
    """The logits of classes at every position, and the loss at positions with a label.

    The class of a text has its label at the text's first position. x passes `norm`, `mean`, a dense layer with its
    activation (tanh if `activation` is None) and `dense_norm`, as far as they are there. `dropout` is that before the
    projection, and `first_dropout` that before the dense layer.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        norm: Norm | None = None,
        mean: bool = False,
        dense: bool = True,
        dense_bias: bool = True,
        activation: str | None = None,
        dense_norm: Norm | None = None,
        dropout: float = 0.0,
        first_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm, self.mean = norm, DocumentMean() if mean else None
        self.first_dropout, self.dropout = Dropout(first_dropout), Dropout(dropout)
        self.dense = Linear(dim, dim, dense_bias) if dense else None
        self.activation = None if activation is None else Activation(activation)
        self.dense_norm = dense_norm
        self.project = Linear(dim, num_classes, True)
        self.project.adaptable = False  # suppliers of the loss multiply by the weight
        self.loss = Loss()

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the linear layers. Classes are a small vocabulary: tensor parallelism divides them as one."""
        classes = Segment("vocab", self.project.weight.shape[0], uneven="pad")
        entries = {
            "project.weight": Parameter((classes, "embed"), inits.weight),
            "project.bias": Parameter((classes,), ZEROS),
        }
        if self.dense is not None:
            entries["dense.weight"] = Parameter(("transformed", "embed"), inits.weight)
            if self.dense.bias is not None:
                entries["dense.bias"] = Parameter(("transformed",), ZEROS)
        return entries

    def forward(
        self, x: Tensor, labels: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels [B, S], positions [1 or B, S], keys [B] -> (sum of the losses, number of labels)."""
        h = self.first_dropout(self._pooled(x, document_lengths), keys, positions)
        h = self.dropout(self._transformed(h), keys, positions)
        loss: tuple[Tensor, Tensor] = self.loss(h, self.project, labels)
        return loss

    def logits(self, x: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D] -> [B, S, C]."""
        logits: Tensor = self.project(self._transformed(self._pooled(x, document_lengths)))
        return logits

    def _pooled(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        if self.norm is not None:
            x, _ = self.norm(x)
        return x if self.mean is None else self.mean(x, document_lengths)

    def _transformed(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        if self.dense is None:
            return x
        if self.activation is None:
            h = torch.tanh(self.dense(x))
        else:
            h = self.activation.activate(self.dense.without_bias(x), self.dense.bias)
        return h if self.dense_norm is None else self.dense_norm(h)[0]


Across = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, int]]
"""This process's vectors [N, D], and which of them count [N] -> those of all processes, and the first own row."""


def own_only(vectors: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int]:
    """What a single process has."""
    return vectors, counts, 0


class EmbeddingHead(nn.Module):
    """A vector of each document, and the contrastive loss of pairs (InfoNCE, arXiv 1807.03748).

    Documents 2i and 2i + 1 of a sample are a pair if the first position of the former has a label. Each former is
    compared with the latter of all pairs: -log softmax(cosine / temperature) at its own. `across` gathers those of
    other processes. `mean`: a vector is the mean over the document's positions; otherwise it is that of the first.
    """

    mixes: ClassVar[frozenset[str]] = frozenset({"batch", "sequence"})

    def __init__(self, *, norm: Norm | None = None, mean: bool = False, temperature: float = 0.05) -> None:
        super().__init__()
        self.norm, self.mean, self.temperature = norm, mean, temperature
        self.across: Across = own_only

    @property
    def varies(self) -> str:
        """What depends on the layout: a step has one micro batch, and an evaluation may have several."""
        return (
            "an evaluation of more than trainer.global_batch_size samples compares the pairs of each micro batch, and "
            "the layout decides which samples are in one"
        )

    def forward(self, x: Tensor, labels: Tensor, document_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels [B, S], lengths [B, M] -> (sum of the losses in nats, number of pairs)."""
        lengths = document_lengths[:, : document_lengths.shape[1] // 2 * 2]
        begins = (lengths.cumsum(dim=1) - lengths).clamp(max=x.shape[1] - 1)  # [B, M]
        counts = (labels.gather(1, begins) != IGNORED)[:, ::2] & (lengths[:, ::2] > 0) & (lengths[:, 1::2] > 0)
        vectors = self.vectors(x, lengths, begins)
        queries, own = (vectors[:, part::2].flatten(0, 1) for part in (0, 1))  # [N, D]
        counts = counts.flatten()
        keys, valid, first = self.across(own, counts)
        scores = (queries @ keys.mT / self.temperature).masked_fill(~valid, float("-inf"))  # [N, all N]
        rows = torch.arange(len(queries), device=x.device)
        scores = torch.where(counts[:, None], scores, 0.0)  # no row is -inf as a whole
        losses = scores.logsumexp(dim=1) - scores[rows, rows + first]
        return (losses * counts).sum(), counts.sum()

    def vectors(self, x: Tensor, lengths: Tensor, begins: Tensor) -> Tensor:
        """x [B, S, D], lengths and first positions of documents [B, M] -> unit vectors [B, M, D] in at least fp32."""
        if self.norm is not None:
            x, _ = self.norm(x)
        if self.mean:
            pooled = _means(x, _members(lengths, x))
        else:
            pooled = x.gather(1, begins[..., None].expand(-1, -1, x.shape[2]))
        return normalize(pooled.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
