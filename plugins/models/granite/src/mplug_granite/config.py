"""The config of Granite: the fields of every decoder, and the factors of its embeddings, branches and logits."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mplug_granite.names import names_of
from mplug_nn import BlockConfig, EmbeddingConfig, GeneralDecoderConfig, PartConfig, ScoreName
from mplug_pretrained import ExternalNames


class GraniteConfig(GeneralDecoderConfig):
    """The shape of the decoder. `attention_scale` is the published attention multiplier."""

    vocab_size: PositiveInt = Field(100352, description="tokens that the model knows")
    tie_embeddings: bool = Field(True, description="use the embedding table as the output projection")
    embedding_multiplier: PositiveFloat = Field(1.0, description="what the embeddings are multiplied by")
    residual_multiplier: PositiveFloat = Field(
        1.0, description="what the output of each part of a block is multiplied by"
    )
    logits_divisor: PositiveFloat = Field(1.0, description="what the logits are divided by")
    moe_router_score: ScoreName = Field("softmax_of_chosen", description="logits to scores, over experts")
    moe_router_normalize: bool | None = Field(False, description="a token's gates sum to moe_router_scale")
    aux_loss_coefficient: float = Field(0.001, ge=0, description="weight of the balancing loss")

    published_as: Literal["granite", "granitemoehybrid"] | None = Field(
        None, description="kind of the published folder; null: granitemoehybrid if blocks have experts or scans"
    )

    @model_validator(mode="after")
    def _folder_fits(self) -> Self:
        if self.published_as == "granite" and self.is_hybrid:
            raise ValueError("published_as=granite has neither experts nor scans; set granitemoehybrid, or null")
        return self

    @property
    def is_hybrid(self) -> bool:
        """Whether blocks have experts or scans."""
        return self.num_experts > 0 or set(self.mixer_types) != {"attention"}

    @property
    def is_published_hybrid(self) -> bool:
        """Whether the published folder is of the kind granitemoehybrid."""
        return self.is_hybrid if self.published_as is None else self.published_as == "granitemoehybrid"

    @property
    def output_scale(self) -> float:
        """What the logits are multiplied by."""
        return 1 / self.logits_divisor

    def embedding_config(self) -> EmbeddingConfig:
        """Tokens alone, multiplied."""
        shared = super().embedding_config()
        return replace(shared, scale=shared.scale * self.embedding_multiplier)

    def block_config(self, number: int) -> PartConfig:
        """The block of every decoder, with a factor of its branches."""
        block = super().block_config(number)
        assert isinstance(block, BlockConfig)
        return replace(block, residual_scale=self.residual_multiplier)

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names_of(self, hybrid=self.is_published_hybrid)
