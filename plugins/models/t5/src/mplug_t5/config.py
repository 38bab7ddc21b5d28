"""The config of T5. No torch."""

from typing import Self

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

from mplug_nn import ActivationName


class T5Config(BaseModel):
    """The shape of T5 (arXiv 1910.10683). The defaults are those of T5 v1.1: a gated MLP, and an untied projection."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: PositiveInt = Field(8, le=10_000, description="blocks of the encoder")
    num_decoder_layers: PositiveInt | None = Field(
        None, le=10_000, description="blocks of the decoder; null: as many as the encoder has"
    )
    hidden_size: PositiveInt = Field(512, description="width of both residual streams")
    num_attention_heads: PositiveInt = Field(6, description="heads of attention")
    head_dim: PositiveInt = Field(64, description="width of a head")
    ffn_hidden_size: PositiveInt = Field(1024, description="width of the MLPs")
    vocab_size: PositiveInt = Field(32128, description="tokens that the model knows")
    activation: ActivationName = Field("geglu_tanh", description="activation of the MLPs")
    bias_ranges: PositiveInt = Field(
        32, ge=4, description="ranges of distances that have a bias of attention; the encoder has half of them each way"
    )
    bias_reach: PositiveInt = Field(128, description="distance from which on all distances are in the last range")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the mean square")
    tie_embeddings: bool = Field(
        False,
        description="use the embedding table as the output projection; encoder and decoder share it in any case",
    )
    scale_output: bool | None = Field(
        None, description="divide the input of the output projection by sqrt(hidden_size); null: if it is tied"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout of both embeddings, of each part's output and of both last norms"
    )
    init_factor: NonNegativeFloat = Field(1.0, description="factor of the standard deviations of initial weights")
    start_token: NonNegativeInt = Field(0, description="the decoder's first token when the model is sampled from")
    encoder_length: PositiveInt = Field(
        512, description="tokens of a sample in the encoder, by which a pipeline is split and FLOPs are estimated"
    )

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        if self.bias_ranges % 2:
            raise ValueError(f"bias_ranges={self.bias_ranges} must be even: half of them are those of later keys")
        if self.bias_reach <= self.bias_ranges // 2:
            raise ValueError(
                f"bias_reach={self.bias_reach} must be more than half of bias_ranges={self.bias_ranges}: the first "
                f"half of the ranges hold a single distance each"
            )
        return self

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def scales_output(self) -> bool:
        """Whether the input of the output projection is divided by sqrt(hidden_size)."""
        return self.tie_embeddings if self.scale_output is None else self.scale_output

    def computes_like(self, other: "T5Config") -> bool:
        """Whether two configs compute the same logits; estimates, initial values and the first token do not count."""
        free = {name: getattr(other, name) for name in ("encoder_length", "init_factor", "dropout", "start_token")}
        return self._whole(**free) == other._whole()

    def _whole(self, **fields: object) -> "T5Config":
        """The config with other fields, and without null."""
        whole = {"num_decoder_layers": self.decoder_layers, "scale_output": self.scales_output}
        return self.model_copy(update=whole | fields)
