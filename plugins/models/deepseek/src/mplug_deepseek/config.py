"""The config of DeepSeek: the fields of decoders with latent attention, some with other defaults."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mplug_deepseek.names import names
from mplug_nn import LatentDecoderConfig, ScoreName
from mplug_pretrained import ExternalNames


class DeepseekConfig(LatentDecoderConfig):
    """The shape of the decoder; the defaults are those of V3."""

    hidden_size: PositiveInt = Field(7168, description="width of the residual stream")
    num_layers: PositiveInt = Field(61, le=10_000, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(128, description="query heads")
    vocab_size: PositiveInt = Field(129280, description="tokens that the model knows")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
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

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names(self, latent_queries=self.q_lora_rank is not None)
