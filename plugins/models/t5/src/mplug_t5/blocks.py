"""The modules of T5. B batch, S tokens of the decoder, R rows: tokens of the encoder, D embed, H heads, V vocabulary.

The encoder's tokens are a stream (`mplug.Stream`): the texts of all samples of a micro batch, concatenated.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug_nn import MLP, Attention, CrossAttention, CrossKeys, Dropout, Embedding, Head, Norm, RelativeBias


class EncoderEmbedding(nn.Module):
    """The vectors of the encoder's tokens, and the bias of attention in all blocks of the encoder."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, token: Embedding, relative: RelativeBias, dropout: float) -> None:
        super().__init__()
        self.token, self.relative, self.dropout = token, relative, Dropout(dropout)

    def forward(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """tokens and places [1, R] -> (x [1, R, D], the bias [H, 2 reach + 1])."""
        return self.dropout(self.token(tokens), of_rows(places), places), self.relative()


def of_rows(places: Tensor) -> Tensor:
    """The key [1] of random numbers in a stream, whose rows have numbers of their own (`places`)."""
    return torch.zeros_like(places[:, 0])


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention in both directions, within each text."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes rows, in a slot

    def __init__(self, norm1: Norm, attn: Attention, norm2: Norm, mlp: MLP, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.dropout1 = norm1, attn, Dropout(dropout)
        self.norm2, self.mlp, self.dropout2 = norm2, mlp, Dropout(dropout)

    def forward(
        self, x: Tensor, bias: Tensor, places: Tensor, lengths: Tensor, encoder_own_rows: Tensor | None = None
    ) -> Tensor:
        """x [1, R, D], bias [H, 2 reach + 1], places [1, R], lengths [1, N], rows of each text [M, T] -> [1, R, D].

        `lengths` are those of all segments, also of padding, from which nothing reads.
        """
        keys = of_rows(places)
        h = self.attn(self.norm1(x)[0], places, keys, lengths, bias_table=bias, document_rows=encoder_own_rows)
        h, x = self.norm2(self.dropout1(h, keys, places), x)
        y: Tensor = self.dropout2(self.mlp(h), keys, places)
        return x + y


class EncoderEnd(nn.Module):
    """The last norm of the encoder."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = norm, Dropout(dropout)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x [1, R, D], places [1, R] -> [1, R, D]."""
        y: Tensor = self.dropout(self.norm(x)[0], of_rows(places), places)
        return y


class DecoderEmbedding(nn.Module):
    """The vectors of the decoder's tokens, and the bias of attention in all blocks of the decoder."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, token: Embedding, relative: RelativeBias, dropout: float) -> None:
        super().__init__()
        self.token, self.relative, self.dropout = token, relative, Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, S], positions [1 or B, S], keys [B] -> (x [B, S, D], the bias [H, 2 reach + 1])."""
        return self.dropout(self.token(tokens), keys, positions), self.relative()


class DecoderBlock(nn.Module):
    """Causal attention, attention to the encoder's output, and an MLP, each of a norm of x and added to x."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot

    def __init__(
        self,
        norms: tuple[Norm, Norm, Norm],
        attn: Attention,
        cross: CrossAttention,
        mlp: MLP,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1, self.norm_cross, self.norm2 = norms
        self.attn, self.cross, self.mlp = attn, cross, mlp
        self.dropout1, self.dropout_cross, self.dropout2 = Dropout(dropout), Dropout(dropout), Dropout(dropout)

    def continued(self, x: Tensor, bias: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """`forward` of later tokens, while the model samples: caches have what the first call has computed."""
        y: Tensor = self(x, bias, None, None, positions, keys)
        return y

    def forward(
        self,
        x: Tensor,
        bias: Tensor,
        memory: Tensor | None,
        rows: Tensor | None,
        positions: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """x [B, S, D], bias [H, 2 reach + 1], memory [1, R, 2 H K], rows [B, T], positions, keys [B] -> [B, S, D].

        `memory` and `rows` are those of `mplug_nn.CrossAttention`.
        """
        h = self.attn(self.norm1(x)[0], positions, keys, bias_table=bias)
        h, x = self.norm_cross(self.dropout1(h, keys, positions), x)
        h = self.cross(h, memory, rows, keys)
        h, x = self.norm2(self.dropout_cross(h, keys, positions), x)
        y: Tensor = self.dropout2(self.mlp(h), keys, positions)
        return x + y


class T5Head(Head):
    """The last norm, dropout, the projection to the vocabulary of what `scale` multiplies, and the loss."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, norm: Norm, hidden_size: int, vocab_size: int, scale: float, dropout: float) -> None:
        super().__init__(norm, hidden_size, vocab_size, scale=scale)
        self.dropout = Dropout(dropout)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        labels: Tensor,
        positions: Tensor,
        keys: Tensor,
        loss_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels and weights [B, S] -> (sum of the losses in nats, number of targets)."""
        return self.loss_of(self.dropout(self.norm(x)[0], keys, positions), labels, loss_weights)


class Encoder(nn.Module):
    """The units of the encoder."""

    def __init__(self, embedding: EncoderEmbedding, blocks: list[EncoderBlock], end: EncoderEnd) -> None:
        super().__init__()
        self.embedding, self.end = embedding, end
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})


class Decoder(nn.Module):
    """The units of the decoder. `memories` are keys and values of the encoder's output, for each block."""

    def __init__(self, embedding: DecoderEmbedding, memories: list[CrossKeys], blocks: list[DecoderBlock]) -> None:
        super().__init__()
        self.embedding = embedding
        self.memories = nn.ModuleDict({str(number): memory for number, memory in enumerate(memories)})
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})


class EncoderDecoder(nn.Module):
    """All units. Encoder and decoder share the table of tokens; if `tied`, it is the head's projection too."""

    def __init__(self, encoder: Encoder, decoder: Decoder, head: T5Head, *, tied: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.decoder.embedding.token.weight = self.encoder.embedding.token.weight
        if tied:
            self.head.project.weight = self.encoder.embedding.token.weight
