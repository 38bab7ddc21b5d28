"""The decoder: embedding, blocks, head. B batch, S sequence, D embed, V vocabulary."""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from mplug.nn import MLP, Attention, Choice, Embedding, Head, MixtureOfExperts, Norm, Router

if TYPE_CHECKING:
    from mplug_mixtral.config import MixtralConfig


class TokenEmbedding(nn.Module):
    """Embeds tokens."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: "MixtralConfig") -> None:
        super().__init__()
        self.token = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, D]."""
        x: Tensor = self.token(tokens)
        return x


class Block(nn.Module):
    """The common part of the blocks: x + attention(norm(x)), then the second norm."""

    def __init__(self, config: "MixtralConfig") -> None:
        super().__init__()
        self.norm1 = Norm(config.hidden_size, "rmsnorm", config.norm_eps)
        self.attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_width,
            bias=False,
            qk_norm=config.qk_norm,
            theta=config.rope_theta,
            eps=config.norm_eps,
        )
        self.norm2 = Norm(config.hidden_size, "rmsnorm", config.norm_eps)

    def attended(self, x: Tensor, positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> (output of the second norm, residual stream), both [B, S, D]."""
        h, x = self.norm1(x)
        attended: tuple[Tensor, Tensor] = self.norm2(self.attn(h, positions, keys), x)
        return attended


class DenseBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot

    def __init__(self, config: "MixtralConfig") -> None:
        super().__init__(config)
        self.mlp = MLP(config.hidden_size, config.ffn_hidden_size, "swiglu", bias=False)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h, x = self.attended(x, positions, keys)
        y: Tensor = self.mlp(h)
        return x + y


class SparseBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes in a slot; the router declares its own mixing

    def __init__(self, config: "MixtralConfig") -> None:
        super().__init__(config)
        self.moe = MixtureOfExperts(
            make_router(config),
            config.hidden_size,
            config.expert_width,
            "swiglu",
            capacity_factor=config.capacity_factor,
            dropping=config.capacity_dropping,
            shared_ffn_dim=config.shared_width,
            shared_gate=config.shared_expert_gate,
        )

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h, x = self.attended(x, positions, keys)
        y: Tensor = self.moe(h, positions, keys)
        return x + y


def make_router(config: "MixtralConfig") -> Router:
    """The router of a block."""
    choice = Choice(
        config.num_experts,
        config.num_experts_per_token,
        config.moe_router_score,
        config.moe_router_num_groups,
        config.moe_router_top_groups,
        config.moe_router_normalize,
        config.moe_router_scale,
    )
    return Router(
        config.hidden_size,
        choice,
        balance=config.moe_balance,
        balance_coefficient=config.aux_loss_coefficient,
        z_coefficient=config.z_loss_coefficient,
        bias_rate=config.expert_bias_rate,
        jitter=config.moe_router_jitter,
    )


class Decoder(nn.Module):
    """The module with the units of a decoder; the host runs them in the plan's order."""

    def __init__(self, config: "MixtralConfig") -> None:
        super().__init__()
        kinds = [DenseBlock if n < config.num_dense_layers else SparseBlock for n in range(config.num_layers)]
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleDict({str(number): kind(config) for number, kind in enumerate(kinds)})
        norm = Norm(config.hidden_size, "rmsnorm", config.norm_eps)
        self.head = Head(norm, config.hidden_size, config.vocab_size)
