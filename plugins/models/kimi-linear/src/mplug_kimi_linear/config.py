"""The config of Kimi Linear: the fields of decoders with latent attention, some with other defaults."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mplug_kimi_linear.names import names_of
from mplug_nn import LatentDecoderConfig, MixerType, ScoreName
from mplug_pretrained import ExternalNames


class KimiLinearConfig(LatentDecoderConfig):
    """The shape of the decoder; the defaults are those of the published model."""

    hidden_size: PositiveInt = Field(2304, description="width of the residual stream")
    num_layers: PositiveInt = Field(27, le=10_000, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(32, description="query heads")
    vocab_size: PositiveInt = Field(163840, description="tokens that the model knows")
    q_lora_rank: PositiveInt | None = Field(None, description="width of the queries' latent vector; null: none")
    position_types: tuple[Literal["rotary", "none"], ...] = Field(
        ("none",), min_length=1, description="positions of each block: rotary, or none"
    )
    mixer_types: tuple[MixerType, ...] = Field(
        ("kimi_delta", "kimi_delta", "kimi_delta", "attention"),
        min_length=1,
        description="what mixes the tokens in each block: attention, or a scan (docs/mixers.md); fewer entries repeat",
    )
    linear_key_head_dim: PositiveInt | None = Field(
        128, description="width of a key of scans, and of a state of mamba2; null: width of a head of attention"
    )
    ffn_hidden_size: PositiveInt = Field(9216, description="width of an MLP: of the dense blocks', of an expert")
    moe_ffn_hidden_size: PositiveInt | None = Field(1024, description="width of an expert; null: ffn_hidden_size")
    num_dense_layers: NonNegativeInt = Field(1, description="blocks at the beginning with an MLP, not experts")
    num_experts: NonNegativeInt = Field(256, description="experts of a block; 0: every block has an MLP")
    num_experts_per_token: PositiveInt = Field(8, description="experts that each token chooses")
    num_shared_experts: NonNegativeInt = Field(1, description="experts that every token uses beside those")
    moe_router_score: ScoreName = Field("sigmoid", description="logits to scores, over experts")
    moe_router_scale: PositiveFloat = Field(2.446, description="what gates are multiplied by")
    aux_loss_coefficient: NonNegativeFloat = Field(1e-4, description="weight of the balancing loss")
    expert_bias_rate: NonNegativeFloat = Field(
        1e-3, description="step of the bias that balances the choice without a loss; 0: it does not change"
    )

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names_of(self)
