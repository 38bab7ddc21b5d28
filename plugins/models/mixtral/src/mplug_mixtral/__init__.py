"""Mixtral: decoders with mixtures of experts as feed-forward parts, from a toy to 141 billion parameters."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from mplug import hookimpl
from mplug_mixtral.presets import PRESETS

if TYPE_CHECKING:
    from mplug import Model


class Mixtral:
    """A decoder with RMSNorm, rotary positions, grouped heads and SwiGLU experts (arXiv 2401.04088, 2412.19437)."""

    presets = PRESETS

    class Config(BaseModel):
        """The shape of the decoder, the choice of experts, and the balancing of their load."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(12, le=10_000, description="transformer blocks")
        hidden_size: PositiveInt = Field(768, description="width of the residual stream")
        num_attention_heads: PositiveInt = Field(12, description="query heads")
        num_kv_heads: PositiveInt | None = Field(
            None, description="key-value heads (GQA); null: as many as query heads"
        )
        head_dim: PositiveInt | None = Field(None, description="width of a head; null: hidden_size / heads")
        vocab_size: PositiveInt = Field(32000, description="tokens that the model knows")
        rope_theta: PositiveFloat = Field(1e6, description="base of the rotary frequencies")
        qk_norm: bool = Field(False, description="RMSNorm on the queries and keys of each head")
        norm_eps: PositiveFloat = Field(1e-5, description="added to the mean square in norms")
        init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")
        ffn_hidden_size: PositiveInt = Field(2048, description="width of an MLP: of the dense blocks', of an expert")
        moe_ffn_hidden_size: PositiveInt | None = Field(None, description="width of an expert; null: ffn_hidden_size")
        num_dense_layers: NonNegativeInt = Field(0, description="blocks at the beginning with an MLP, not experts")
        num_experts: PositiveInt = Field(8, description="experts of a block")
        num_experts_per_token: PositiveInt = Field(2, description="experts that each token chooses")
        num_shared_experts: NonNegativeInt = Field(0, description="experts that every token uses beside those")
        shared_expert_gate: bool = Field(False, description="a sigmoid of the token weighs the shared experts")
        moe_router_score: Literal["softmax", "sigmoid"] = Field("softmax", description="logits to scores, over experts")
        moe_router_num_groups: PositiveInt = Field(1, description="groups that the experts are divided into")
        moe_router_top_groups: PositiveInt = Field(1, description="groups that a token may choose from")
        moe_router_normalize: bool = Field(True, description="a token's gates sum to moe_router_scale")
        moe_router_scale: PositiveFloat = Field(1.0, description="what gates are multiplied by")
        moe_router_jitter: float = Field(
            0.0, ge=0, lt=1, description="uniform noise on the router's input: 1 +- jitter"
        )
        moe_balance: Literal["none", "micro_batch", "sequence", "global_batch"] = Field(
            "sequence", description="what the balancing loss is taken over; global_batch: by the shares of the last one"
        )
        aux_loss_coefficient: NonNegativeFloat = Field(0.01, description="weight of the balancing loss")
        z_loss_coefficient: NonNegativeFloat = Field(0.0, description="weight of the router's z-loss")
        expert_bias_rate: NonNegativeFloat = Field(
            0.0, description="step of the bias that balances the choice without a loss; 0: no bias"
        )
        capacity_factor: PositiveFloat | None = Field(
            None, description="room of an expert, as a multiple of its even share of a micro batch; null: none dropped"
        )
        capacity_dropping: Literal["position", "probability"] = Field(
            "probability",
            description="whose choice counts where an expert is full: the first tokens', the highest gates'",
        )

        @model_validator(mode="after")
        def _heads_fit(self) -> Self:
            heads, kv_heads = self.num_attention_heads, self.kv_heads
            if self.head_dim is None and self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}; set head_dim"
                )
            if heads % kv_heads:
                raise ValueError(f"num_kv_heads={kv_heads} does not divide num_attention_heads={heads}")
            if self.head_width % 2:
                raise ValueError(f"rotary positions need an even head_dim, not {self.head_width}")
            return self

        @model_validator(mode="after")
        def _experts_fit(self) -> Self:
            experts, groups, chosen = self.num_experts, self.moe_router_num_groups, self.num_experts_per_token
            if experts % groups:
                raise ValueError(f"moe_router_num_groups={groups} does not divide num_experts={experts}")
            if self.moe_router_top_groups > groups:
                raise ValueError(f"moe_router_top_groups={self.moe_router_top_groups} is more than {groups} groups")
            room = experts // groups * self.moe_router_top_groups
            if chosen > room:
                raise ValueError(f"num_experts_per_token={chosen} is more than the {room} experts to choose from")
            if self.num_dense_layers >= self.num_layers:
                raise ValueError(
                    f"num_dense_layers={self.num_dense_layers} leaves none of {self.num_layers} for experts"
                )
            if self.shared_expert_gate and not self.num_shared_experts:
                raise ValueError("shared_expert_gate weighs shared experts, and num_shared_experts is 0")
            return self

        @property
        def kv_heads(self) -> int:
            """Number of key-value heads."""
            return self.num_kv_heads or self.num_attention_heads

        @property
        def head_width(self) -> int:
            """Width of a head."""
            return self.head_dim or self.hidden_size // self.num_attention_heads

        @property
        def expert_width(self) -> int:
            """Width of an expert."""
            return self.moe_ffn_hidden_size or self.ffn_hidden_size

        @property
        def shared_width(self) -> int:
            """Total width of the shared experts, which form one MLP."""
            return self.num_shared_experts * self.expert_width

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug import Model
        from mplug_mixtral.decoder import Decoder
        from mplug_mixtral.plan import make_plan

        return Model(Decoder(self.config), make_plan(self.config))
