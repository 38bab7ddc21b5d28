"""The config of DeepSeek: the fields of every decoder, some with other defaults, and those of latent attention."""

from dataclasses import replace
from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mplug import ExternalNames
from mplug_deepseek.names import names
from mplug_nn import GeneralDecoderConfig, LatentAttentionConfig, ScoreName

UNUSED = (
    *("num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "attention_out_bias", "window_rope_theta"),
    "attention_output_gate",
)
"""Fields of other attentions; latent attention has neither of them."""


class DeepseekConfig(GeneralDecoderConfig):
    """The shape of the decoder; the defaults are those of V3. The widths of heads are those of latent attention."""

    hidden_size: PositiveInt = Field(7168, description="width of the residual stream")
    num_layers: PositiveInt = Field(61, le=10_000, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(128, description="query heads")
    vocab_size: PositiveInt = Field(129280, description="tokens that the model knows")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
    q_lora_rank: PositiveInt | None = Field(1536, description="width of the queries' latent vector; null: none")
    kv_lora_rank: PositiveInt = Field(512, description="width of the latent vector of keys and values")
    qk_nope_head_dim: PositiveInt = Field(128, description="width of the part of a key without positions")
    qk_rope_head_dim: PositiveInt = Field(64, description="width of the part of a key with rotary positions")
    v_head_dim: PositiveInt = Field(128, description="width of a value")
    rope_interleaved: bool = Field(True, description="rotate neighbouring coordinates, not those of a head's halves")
    ffn_hidden_size: PositiveInt = Field(18432, description="width of an MLP: of the dense blocks', of an expert")
    moe_ffn_hidden_size: PositiveInt | None = Field(2048, description="width of an expert; null: ffn_hidden_size")
    num_dense_layers: NonNegativeInt = Field(3, description="blocks at the beginning with an MLP, not experts")
    num_experts: NonNegativeInt = Field(256, description="experts of a block; 0: every block has an MLP")
    num_experts_per_token: PositiveInt = Field(8, description="experts that each token chooses")
    num_shared_experts: NonNegativeInt = Field(1, description="experts that every token uses beside those")
    moe_router_score: ScoreName = Field("sigmoid", description="logits to scores, over experts")
    moe_router_num_groups: PositiveInt = Field(8, description="groups that the experts are divided into")
    moe_router_top_groups: PositiveInt = Field(4, description="groups that a token may choose from")
    moe_router_scale: PositiveFloat = Field(2.5, description="what gates are multiplied by")
    aux_loss_coefficient: NonNegativeFloat = Field(1e-4, description="weight of the balancing loss")
    expert_bias_rate: NonNegativeFloat = Field(
        1e-3, description="step of the bias that balances the choice without a loss; 0: it does not change"
    )

    @model_validator(mode="after")
    def _latent_attention_fits(self) -> Self:
        defaults = type(self).model_fields
        for name in UNUSED:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name}={getattr(self, name)} does not apply to latent attention; remove it")
        if self.rope_fraction != 1:
            raise ValueError("rope_fraction does not apply to latent attention; set qk_rope_head_dim")
        return self

    @property
    def head_width(self) -> int:
        """Width of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_width(self) -> int:
        """Width of the part of a key with rotary positions."""
        return self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The factor of attention scores; YaRN multiplies it (arXiv 2405.04434, section 3.1.4)."""
        return self.attention_scale or float(self.head_width**-0.5 * self.rotary().score_factor)

    def attention_of(self, number: int) -> LatentAttentionConfig:
        """The attention of block `number`."""
        rotary = replace(self.rotary(), width=None)
        windowed = self.entry("attention_types", number) == "window"
        return LatentAttentionConfig(
            num_heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            key_width=self.qk_nope_head_dim,
            rotary_width=self.qk_rope_head_dim,
            value_width=self.v_head_dim,
            rotary=rotary if self.entry("position_types", number) == "rotary" else None,
            scale=self.scale,
            window=self.window if windowed else None,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
        )

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names(self, latent_queries=self.q_lora_rank is not None)
