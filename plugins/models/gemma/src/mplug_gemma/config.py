"""The config of Gemma: the fields of every decoder, some with other defaults, and the tower."""

from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mplug_gemma.names import external_names
from mplug_gemma.vision import VisionConfig
from mplug_nn import ActivationName, AttentionConfig, GeneralDecoderConfig, NormName
from mplug_pretrained import ExternalNames


class GemmaConfig(GeneralDecoderConfig):
    """The shape of the decoder. The defaults are common to Gemma 2 and 3; presets set the others."""

    vocab_size: PositiveInt = Field(256000, description="tokens that the model knows")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
    norm: NormName = Field("offset_rmsnorm", description="norm before each part of a block, and before the head")
    post_norms: bool = Field(True, description="also a norm of the output of each part of a block")
    activation: ActivationName = Field("geglu_tanh", description="activation of MLPs and experts")
    tie_embeddings: bool = Field(True, description="use the embedding table as the output projection")
    scale_embeddings: bool = Field(True, description="multiply the embeddings by the square root of hidden_size")
    vision: VisionConfig | None = Field(
        None, description="the tower that sees (Gemma 3); null: a decoder of text alone"
    )

    @model_validator(mode="after")
    def _tower_fits(self) -> Self:
        if self.vision is None:
            return self
        if self.vision.image_token >= self.vocab_size:
            raise ValueError(
                f"vision: image_token={self.vision.image_token} has no row in a table of {self.vocab_size} tokens"
            )
        if self.num_mtp_layers:
            raise ValueError(
                f"num_mtp_layers={self.num_mtp_layers} cannot be used with a tower: the tokens ahead may be those of "
                f"an image, which have no embedding"
            )
        if set(self.mixer_types) != {"attention"}:
            raise ValueError(
                "mixer_types has scans, in which the tokens of an image cannot see each other; use attention"
            )
        return self

    def attention_config(self) -> AttentionConfig:
        """Attention; with a tower, the tokens of an image also see the later tokens of that image."""
        return replace(super().attention_config(), position_groups=self.vision is not None)

    def of_text(self) -> "GemmaConfig":
        """The same decoder without the tower."""
        return self.model_copy(update={"vision": None})

    def _computed(self) -> tuple[object, ...]:
        return *super()._computed(), self.vision and self.vision.computed()

    def external_names(self) -> ExternalNames:
        """The names that most families share, and with a tower those of Gemma 3."""
        return external_names(self, self.vision)
