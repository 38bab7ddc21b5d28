"""The config of LLaVA: a tower, a projector, and a decoder of any family. Imports no torch."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from mplug import Family
from mplug_llava.vision import VisionConfig
from mplug_nn import ActivationName


class LlavaConfig(BaseModel):
    """The shape of the tower and of the projector, and the section of the decoder's family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decoder: Family = Field(description="the decoder: 'name' of a family, 'preset' of it, and fields of it")
    vision: VisionConfig = Field(VisionConfig(), description="the tower that sees")
    projector_activation: ActivationName = Field("gelu", description="activation between the projector's products")
    projector_bias: bool = Field(True, description="biases of the projector")
    image_token: NonNegativeInt = Field(32000, description="token in whose place a row of a picture stands")

    @model_validator(mode="after")
    def _decoder_fits(self) -> Self:
        for name in ("vocab_size", "hidden_size"):
            if not isinstance(getattr(self.decoder.config, name, None), int):
                raise ValueError(
                    f"decoder: {self.decoder.label} has no size '{name}', by which a projector and tokens fit it"
                )
        if self.image_token >= self.vocab_size:
            raise ValueError(
                f"image_token={self.image_token} is not less than the decoder's vocab_size={self.vocab_size}"
            )
        return self

    @property
    def vocab_size(self) -> int:
        """Tokens that the decoder knows."""
        return int(self.decoder.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the decoder."""
        return int(self.decoder.config.hidden_size)

    def computes_like(self, other: "LlavaConfig") -> bool:
        """Whether two configs describe the same model, also if a family can spell it differently."""
        one, two = self.decoder, other.decoder
        if one.entry != two.entry or not _alike(one.config, two.config):
            return False
        return self.model_copy(update={"decoder": two}) == other


def _alike(one: Any, other: Any) -> bool:
    computes_like = getattr(one, "computes_like", None)
    return bool(computes_like(other)) if callable(computes_like) else bool(one == other)
