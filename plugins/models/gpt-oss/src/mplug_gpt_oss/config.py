"""The config of gpt-oss: the fields of every decoder, some with other defaults."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mplug_gpt_oss.names import names
from mplug_nn import ActivationName, GeneralDecoderConfig, RopeScaling, ScoreName
from mplug_pretrained import ExternalNames


class GptOssConfig(GeneralDecoderConfig):
    """The shape of the decoder; the defaults are those of the published models."""

    hidden_size: PositiveInt = Field(2880, description="width of the residual stream")
    num_attention_heads: PositiveInt = Field(64, description="query heads")
    num_kv_heads: PositiveInt | None = Field(8, description="key-value heads (GQA); null: as many as query heads")
    head_dim: PositiveInt | None = Field(64, description="width of a head; null: hidden_size / heads")
    ffn_hidden_size: PositiveInt = Field(2880, description="width of an MLP: of the dense blocks', of an expert")
    vocab_size: PositiveInt = Field(201088, description="tokens that the model knows")
    activation: ActivationName = Field("clamped_swiglu", description="activation of MLPs and experts")
    qkv_bias: bool = Field(True, description="biases of the projections to queries, keys and values")
    attention_out_bias: bool = Field(True, description="bias of attention's output projection")
    expert_projection_bias: bool = Field(True, description="biases of the experts' projections")
    attention_sinks: bool = Field(True, description="a trained score without a value for each head")
    window: PositiveInt | None = Field(128, description="positions that blocks of the type 'window' see")
    attention_types: tuple[Literal["full", "window"], ...] = Field(
        ("window", "full"), min_length=1, description="attention of each block: whole sequences, or windows"
    )
    rope_theta: PositiveFloat = Field(150000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(
        {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        description="scaling of rotary positions: its name as 'type' (linear, llama3, longrope, yarn), and its options",
    )
    num_experts: int = Field(32, ge=0, description="experts of a block; 0: every block has an MLP")
    num_experts_per_token: PositiveInt = Field(4, description="experts that each token chooses")
    moe_router_score: ScoreName = Field("softmax_of_chosen", description="logits to scores, over experts")
    moe_router_normalize: bool | None = Field(False, description="a token's gates sum to moe_router_scale")
    moe_router_bias: bool = Field(True, description="a trained bias of the router's logits")

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names(self)
