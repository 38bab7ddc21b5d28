"""Linear attention, after "Transformers are RNNs" (arXiv 2006.16236): a decoder, and a kernel for it."""

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from mplug import Offer, RunConfig, Site, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run

LINEAR = "linear attention"
"""What the sites of the model need, and what the kernel offers."""


class LinearTransformer:
    """A pre-norm decoder with linear attention, learned positions and GELU."""

    presets: dict[str, dict[str, dict[str, Any]]] = {
        "nano": {
            "model": {
                "num_layers": 4,
                "num_attention_heads": 4,
                "hidden_size": 128,
                "vocab_size": 256,
                "max_position_embeddings": 256,
                "init_std": 0.06,
            },
            "kernels": {"attention": "chunked"},
        },
    }

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(12, description="transformer blocks")
        hidden_size: PositiveInt = Field(768, description="width of the residual stream")
        num_attention_heads: PositiveInt = Field(12, description="heads")
        vocab_size: PositiveInt = Field(50257, description="tokens that the model knows")
        max_position_embeddings: PositiveInt = Field(2048, description="longest sequence: positions are learned")
        norm_eps: PositiveFloat = Field(1e-5, description="added to the variance in norms")
        init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")

        @model_validator(mode="after")
        def _heads_fit(self) -> Self:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
                )
            return self

        @property
        def head_dim(self) -> int:
            """Width of a head."""
            return self.hidden_size // self.num_attention_heads

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: RunConfig) -> None:
        """Learned positions end somewhere."""
        length, longest = config.trainer.seq_length, self.config.max_position_embeddings
        if length > longest:
            raise UsageError(f"trainer.seq_length={length} is longer than model.max_position_embeddings={longest}")

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug import Model
        from nova_linear.decoder import Decoder
        from nova_linear.plan import make_plan

        decoder = Decoder(self.config)
        return Model(decoder, make_plan(decoder, self.config))


class Chunked:
    """Causal linear attention in chunks, in time and memory that grow with the length of a sequence."""

    class Config(BaseModel):
        """The size of a chunk."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        chunk: PositiveInt = Field(64, description="positions whose weights for each other are computed one by one")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The attention core."""
        from functools import partial

        from nova_linear.chunks import attention

        return [Offer({"Attention.core": partial(attention, chunk=self.config.chunk)}, supports)]


def supports(site: Site, run: "Run") -> bool | str:
    """Sites that ask for linear attention, and for nothing beyond it; no dropout."""
    if LINEAR not in site.needs:
        return f"it computes {LINEAR}, and this site asks for another function"
    if lacking := site.lacking({LINEAR}):
        return lacking
    if site.module.dropout > 0:
        return f"it drops no attention weights, and this site's dropout is {site.module.dropout}"
    return True
