"""Peregrine: decoders whose attention and MLP work side by side, after PaLM (arXiv 2204.02311, section 2)."""

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from mplug import hookimpl
from nova_peregrine.presets import PRESETS

if TYPE_CHECKING:
    from mplug import Model


class Peregrine:
    """A parallel decoder with fused projections, grouped heads, SwiGLU and rotary positions."""

    presets = PRESETS

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(12, description="parallel blocks")
        hidden_size: PositiveInt = Field(768, description="width of the residual stream")
        num_attention_heads: PositiveInt = Field(12, description="query heads")
        num_kv_heads: PositiveInt = Field(1, description="key-value heads; 1 is multi-query attention")
        head_dim: PositiveInt = Field(64, multiple_of=2, description="width of a head; rotary positions need it even")
        ffn_hidden_size: PositiveInt = Field(3072, description="width of the MLP")
        vocab_size: PositiveInt = Field(50257, description="tokens that the model knows")
        rope_theta: PositiveFloat = Field(10000.0, description="base of the rotary frequencies")
        qk_norm: bool = Field(False, description="RMSNorm on the queries and keys of each head")
        norm_eps: PositiveFloat = Field(1e-5, description="added to the variance in norms")
        tie_embeddings: bool = Field(True, description="the output projection is the embedding's table")
        init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")

        @model_validator(mode="after")
        def _heads_fit(self) -> Self:
            if self.num_attention_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_kv_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_attention_heads}"
                )
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug import Model
        from nova_peregrine.decoder import Decoder
        from nova_peregrine.plan import make_plan

        return Model(Decoder(self.config), make_plan(self.config))
