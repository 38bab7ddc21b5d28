"""The decoder: embedding, blocks, head. B batch, S sequence, D embed, V vocabulary."""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from mplug.nn import MLP, Attention, Dropout, Embedding, Head, Norm
from mplug.nn.specification import ALIBI

if TYPE_CHECKING:
    from mplug_gpt.config import GPTConfig


class TokenEmbedding(nn.Module):
    """Embeds tokens, and positions if they are learned."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        self.token = Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.position = Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, D]."""
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        return self.dropout(x, keys, positions)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        norm_bias = config.bias and config.norm == "layernorm"
        self.norm1 = Norm(config.hidden_size, config.norm, config.norm_eps, norm_bias)
        self.attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_width,
            bias=config.bias,
            qk_norm=config.qk_norm,
            theta=config.rope_theta if config.position == "rotary" else None,
            dropout=config.attention_dropout,
            eps=config.norm_eps,
            attention_bias=ALIBI if config.position == "alibi" else "",
        )
        self.dropout1 = Dropout(config.dropout)
        self.norm2 = Norm(config.hidden_size, config.norm, config.norm_eps, norm_bias)
        self.mlp = MLP(config.hidden_size, config.ffn_width, config.activation, config.bias)
        self.dropout2 = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]; document lengths [B, M] if samples are packed."""
        h, x = self.norm1(x)
        h = self.attn(h, positions, keys, document_lengths)
        h, x = self.norm2(self.dropout1(h, keys, positions), x)
        return x + self.dropout2(self.mlp(h), keys, positions)


class Decoder(nn.Module):
    """The module with the units of a GPT; the host runs them in the plan's order."""

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.num_layers)})
        norm = Norm(config.hidden_size, config.norm, config.norm_eps, config.bias and config.norm == "layernorm")
        self.head = Head(norm, config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.head.project.weight = self.embedding.token.weight
