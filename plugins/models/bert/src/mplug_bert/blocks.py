"""The modules of an encoder that decoders do not have. B batch, S sequence, D embed, V vocabulary, M documents."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug import Entries, Init, Inits, Parameter, Segment
from mplug_nn import MLP, Activation, Attention, Dropout, Embedding, Linear, Loss, Norm

ZEROS = Init("constant", value=0.0)


class EncoderEmbedding(nn.Module):
    """norm(token + position + token type). Without `num_positions`, neither positions nor types have vectors.

    Positions count from row `offset` of their table on.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        vocab_size: int,
        norm: Norm,
        *,
        num_positions: int | None = None,
        offset: int = 0,
        num_types: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dim = norm.weight.shape[0]
        self.offset = offset
        self.token = Embedding(vocab_size, dim)
        self.position = Embedding(num_positions, dim) if num_positions is not None else None
        self.token_type = Embedding(num_types, dim) if num_types else None
        self.norm = norm
        self.dropout = Dropout(dropout)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the tables of positions and types; the table of tokens describes itself."""
        tables = {
            "position.weight": ("positions", self.position),
            "token_type.weight": ("token_types", self.token_type),
        }
        return {name: Parameter((axis, "embed"), inits.weight) for name, (axis, table) in tables.items() if table}

    def forward(self, tokens: Tensor, positions: Tensor, keys: Tensor, token_types: Tensor | None = None) -> Tensor:
        """tokens [B, S], positions [1 or B, S], keys [B], types [B, S] -> [B, S, D]; without types, all are 0."""
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(positions + self.offset)
        if self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(positions) if token_types is None else token_types)
        x, _ = self.norm(x)
        y: Tensor = self.dropout(x, keys, positions)
        return y


class PostNormBlock(nn.Module):
    """x = norm(x + attention(x)), then norm(x + mlp(x)) (Transformer, arXiv 1706.03762, section 3.1)."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot

    def __init__(self, attn: Attention, norm1: Norm, mlp: MLP, norm2: Norm, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn, self.norm1, self.dropout1 = attn, norm1, Dropout(dropout)
        self.mlp, self.norm2, self.dropout2 = mlp, norm2, Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], keys [B], lengths [B, M] if samples are packed -> [B, S, D]."""
        h = self.attn(x, positions, keys, document_lengths)
        x, _ = self.norm1(self.dropout1(h, keys, positions), x)
        y: Tensor = self.norm2(self.dropout2(self.mlp(x), keys, positions), x)[0]
        return y


class MaskedHead(nn.Module):
    """The logits of every position: norm(act(dense(x))) times the table of tokens, plus a bias; and their loss.

    With `norm`, it comes first: the last norm of pre-norm blocks.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        vocab_size: int,
        dense_norm: Norm,
        activation: str,
        *,
        norm: Norm | None = None,
        dense_bias: bool = True,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        dim = dense_norm.weight.shape[0]
        self.norm = norm
        self.dense = Linear(dim, dim, dense_bias)
        self.activation = Activation(activation)
        self.dense_norm = dense_norm
        self.project = Linear(dim, vocab_size, output_bias)
        self.project.adaptable = False  # suppliers of the loss multiply by the weight
        self.loss = Loss()

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the transform and of the projection; the norms describe themselves."""
        vocab = Segment("vocab", self.project.weight.shape[0], uneven="pad")
        entries = {
            "dense.weight": Parameter(("transformed", "embed"), inits.residual),
            "project.weight": Parameter((vocab, "embed"), inits.residual),
        }
        if self.dense.bias is not None:
            entries["dense.bias"] = Parameter(("transformed",), ZEROS)
        if self.project.bias is not None:
            entries["project.bias"] = Parameter((vocab,), ZEROS)
        return entries

    def forward(self, x: Tensor, labels: Tensor, loss_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels and weights of their losses [B, S] -> (sum of the losses in nats, number of targets)."""
        loss: tuple[Tensor, Tensor] = self.loss(self._transformed(x), self.project, labels, loss_weights)
        return loss

    def logits(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, V]."""
        logits: Tensor = self.project(self._transformed(x))
        return logits

    def _transformed(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        if self.norm is not None:
            x, _ = self.norm(x)
        h = self.activation.activate(self.dense.without_bias(x), self.dense.bias)
        y: Tensor = self.dense_norm(h)[0]
        return y


class Encoder(nn.Module):
    """The units of an encoder: embedding, blocks, head.

    With `tied`, the projection of a head of masked tokens is the table of tokens.
    """

    def __init__(
        self, embedding: EncoderEmbedding, blocks: Iterable[nn.Module], head: nn.Module, *, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.head = head
        if tied and isinstance(head, MaskedHead):
            head.project.weight = self.embedding.token.weight
