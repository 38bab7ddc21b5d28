"""GPT: pre-norm decoders, from a toy to 462 billion parameters."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from mplug import RunConfig, UsageError, hookimpl
from mplug_gpt.presets import PRESETS

if TYPE_CHECKING:
    from mplug import Model


class GPT:
    """A decoder with learned, rotary or ALiBi positions, grouped heads, and a choice of norms and activations."""

    presets = PRESETS

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(12, le=10_000, description="transformer blocks")
        hidden_size: PositiveInt = Field(768, description="width of the residual stream")
        num_attention_heads: PositiveInt = Field(12, description="query heads")
        num_kv_heads: PositiveInt | None = Field(
            None, description="key-value heads (GQA); null: as many as query heads"
        )
        head_dim: PositiveInt | None = Field(None, description="width of a head; null: hidden_size / heads")
        ffn_hidden_size: PositiveInt | None = Field(
            None,
            description="width of the MLP; null: 4 hidden_size, with swiglu 8/3 of it rounded up to a multiple of 64",
        )
        vocab_size: PositiveInt = Field(50257, description="tokens that the model knows")
        position: Literal["learned", "rotary", "alibi"] = Field(
            "rotary",
            description="how the model knows positions; alibi: attention scores fall with the distance, by a slope of "
            "each head's own",
        )
        max_position_embeddings: PositiveInt = Field(2048, description="longest sequence, where positions are learned")
        rope_theta: PositiveFloat = Field(10000.0, description="base of the rotary frequencies")
        qk_norm: bool = Field(False, description="RMSNorm on the queries and keys of each head")
        activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field("gelu", description="activation of the MLP")
        norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="normalisation before each part")
        norm_eps: PositiveFloat = Field(1e-5, description="added to the variance in norms")
        tie_embeddings: bool = Field(False, description="the output projection is the embedding's table")
        bias: bool = Field(False, description="biases in linear layers and layer norms")
        dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the embeddings and of each part's output")
        attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
        init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")

        @model_validator(mode="after")
        def _heads_fit(self) -> Self:
            heads, kv_heads = self.num_attention_heads, self.num_kv_heads or self.num_attention_heads
            if self.head_dim is None and self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}; set head_dim"
                )
            if heads % kv_heads:
                raise ValueError(f"num_kv_heads={kv_heads} does not divide num_attention_heads={heads}")
            if self.position == "rotary" and self.head_width % 2:
                raise ValueError(f"rotary positions need an even head_dim, not {self.head_width}")
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
        def ffn_width(self) -> int:
            """Width of the MLP."""
            wide = 4 * self.hidden_size
            return self.ffn_hidden_size or (-(-wide * 2 // 3 // 64) * 64 if self.activation == "swiglu" else wide)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: RunConfig) -> None:
        """Refuse sequences that are longer than the table of learned positions."""
        longest = self.config.max_position_embeddings
        if self.config.position == "learned" and config.trainer.seq_length > longest:
            raise UsageError(
                f"trainer.seq_length={config.trainer.seq_length} is longer than model.max_position_embeddings={longest}"
            )

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug import Model
        from mplug_gpt.decoder import Decoder
        from mplug_gpt.plan import make_plan

        return Model(Decoder(self.config), make_plan(self.config))
