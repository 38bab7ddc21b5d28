"""The config of GPT: its fields beyond those of every decoder, and its blocks."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, PositiveInt

from mplug_gpt.names import names
from mplug_nn import ActivationName, BlockConfig, DecoderConfig, EmbeddingConfig, MLPConfig, NormConfig, NormName
from mplug_pretrained import ExternalNames


class GPTConfig(DecoderConfig):
    """The shape of the decoder."""

    ffn_hidden_size: PositiveInt | None = Field(
        None,
        description="width of the MLP; null: 4 hidden_size, or with a gated activation (swiglu) 8/3 hidden_size, "
        "rounded up to a multiple of 64",
    )
    position: Literal["learned", "rotary", "alibi"] = Field(
        "rotary",
        description="encoding of positions; alibi: attention scores decrease with the distance, with a separate slope "
        "for each head",
    )
    max_position_embeddings: PositiveInt = Field(2048, description="maximum sequence length with learned positions")
    activation: ActivationName = Field("gelu", description="activation of the MLP")
    norm: NormName = Field("layernorm", description="normalisation before each part")
    tie_embeddings: bool = Field(False, description="use the embedding table as the output projection")
    bias: bool = Field(False, description="add biases to linear layers and layer norms")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the embeddings and of each part's output")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")

    @property
    def has_rotary_positions(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.position == "rotary"

    @property
    def ffn_width(self) -> int:
        """Width of the MLP."""
        from mplug_nn.activations import is_gated  # imports torch, and only building a model asks for the width

        wide = 4 * self.hidden_size
        return self.ffn_hidden_size or (-(-wide * 2 // 3 // 64) * 64 if is_gated(self.activation) else wide)

    def norm_config(self) -> NormConfig:
        """The norm of the field `norm`; no RMSNorm has a bias."""
        return NormConfig(self.norm, self.norm_eps, self.bias and not self.norm.endswith("rmsnorm"))

    def embedding_config(self) -> EmbeddingConfig:
        """Tokens, and learned positions."""
        positions = self.max_position_embeddings if self.position == "learned" else None
        return EmbeddingConfig(positions, self.dropout, self.tie_embeddings)

    def block_config(self, number: int) -> BlockConfig:
        """A block."""
        attention = replace(
            self.attention_config(),
            bias=self.bias,
            dropout=self.attention_dropout,
            attention_bias="alibi" if self.position == "alibi" else "",
        )
        mlp = MLPConfig(self.ffn_width, self.activation, self.bias)
        return BlockConfig(self.norm_config(), attention, mlp, self.dropout)

    def external_names(self) -> ExternalNames | None:
        """Those of GPT-2."""
        return names(bias=self.bias, learned=self.position == "learned")
