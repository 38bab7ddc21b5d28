"""The decoder: embedding, blocks, head. B batch, S sequence, D embed, V vocabulary."""

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from mplug import ActivationProduct, Declared, Flops, Slot, Step, declare
from mplug_nn import MLP, SLOTS, Attention, Embedding, Head, Norm
from nova_linear import LINEAR
from nova_linear.weights import linear_attention

if TYPE_CHECKING:
    from nova_linear import LinearTransformer


class LinearAttention(Attention):
    """Projections around linear attention: a supplier of its core must offer that, too."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (
        replace(SLOTS["Attention.core"], default=linear_attention, serves=frozenset({LINEAR})),
        SLOTS["Attention.prepare_qk"],
        SLOTS["Attention.prepare_qkv"],
    )
    mixes: ClassVar[frozenset[str]] = frozenset()  # its core does, in a slot

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__(dim, num_heads, num_heads, head_dim, bias=False, qk_norm=False, theta=None)

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """Of the core, linear attention."""
        needs = super().needs(slot, entries)
        return needs | {LINEAR} if slot == "Attention.core" else needs

    def plan_work(self) -> Step:
        """The projections around linear attention."""
        flops = core_flops(self.num_heads, self.spec.key_width, self.spec.value_width)
        return ("qkv", ActivationProduct(flops), "out")


def core_flops(num_heads: int, key_width: int, value_width: int) -> Flops:
    """Of one layer's linear attention: a token adds its key times its value to a matrix, and its query reads it."""
    return Flops(per_token=3 * 2 * num_heads * 2 * key_width * value_width, per_squared_length=0)


class TokenEmbedding(nn.Module):
    """Tokens and learned positions."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: "LinearTransformer.Config") -> None:
        super().__init__()
        self.token = Embedding(config.vocab_size, config.hidden_size)
        table = Embedding(config.max_position_embeddings, config.hidden_size)
        self.position = declare(table, weight=Declared(("positions", "embed")))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, S], positions [1 or B, S] -> [B, S, D]."""
        x: Tensor = self.token(tokens) + self.position(positions)
        return x


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: "LinearTransformer.Config") -> None:
        super().__init__()
        self.norm1 = Norm(config.hidden_size, "layernorm", config.norm_eps)
        self.attn = LinearAttention(config.hidden_size, config.num_attention_heads, config.head_dim)
        self.norm2 = Norm(config.hidden_size, "layernorm", config.norm_eps)
        self.mlp = MLP(config.hidden_size, 4 * config.hidden_size, "gelu", bias=False)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """x [B, S, D], positions [1 or B, S], keys [B] -> [B, S, D]."""
        h, x = self.norm1(x)
        h, x = self.norm2(self.attn(h, positions, keys), x)
        y: Tensor = x + self.mlp(h)
        return y


class Decoder(nn.Module):
    """The units of a linear transformer; the host runs them in the plan's order."""

    def __init__(self, config: "LinearTransformer.Config") -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.num_layers)})
        norm = Norm(config.hidden_size, "layernorm", config.norm_eps)
        self.head = Head(norm, config.hidden_size, config.vocab_size)
