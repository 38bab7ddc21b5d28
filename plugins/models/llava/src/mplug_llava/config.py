"""The config of LLaVA: a tower, a projector, and a decoder of any family. Imports no torch."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from mplug import Family
from mplug_llava.tiling import TilingConfig
from mplug_llava.vision import CONTEXT, TILED_CONTEXT, VisionConfig
from mplug_nn import ActivationName


class LlavaConfig(BaseModel):
    """The shape of the tower and of the projector, and the section of the decoder's family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decoder: Family = Field(description="the decoder: 'name' of a family, 'preset' of it, and fields of it")
    vision: VisionConfig = Field(VisionConfig(), description="the tower that sees")
    projector_activation: ActivationName = Field("gelu", description="activation between the projector's products")
    projector_bias: bool = Field(True, description="biases of the projector")
    image_token: NonNegativeInt = Field(32000, description="token in whose place a row of a picture stands")
    tiling: TilingConfig | None = Field(
        None,
        description="pictures as a whole and as tiles, and videos (LLaVA-OneVision); null: a square for each picture",
    )

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

    @model_validator(mode="after")
    def _tiling_fits(self) -> Self:
        tiling, vision = self.tiling, self.vision
        if tiling is None:
            return self
        if tiling.video_token >= self.vocab_size or tiling.video_token == self.image_token:
            raise ValueError(
                f"tiling: video_token={tiling.video_token} must be another token than image_token, and less than the "
                f"decoder's vocab_size={self.vocab_size}"
            )
        for size in (size for size in tiling.resolutions if any(one % vision.image_size for one in size)):
            raise ValueError(
                f"tiling: resolutions has {list(size)}, of which vision.image_size={vision.image_size} is no divisor"
            )
        if vision.fit != "stretch":
            raise ValueError("tiling: pictures as a whole are stretched, so it needs vision.fit=stretch")
        if vision.features != "patches":
            raise ValueError("tiling: a class row has no place in a grid of tiles, so it needs vision.features=patches")
        return self

    @property
    def context(self) -> dict[str, tuple[str, ...]]:
        """The entries of a micro batch with pictures, and their axes."""
        return CONTEXT if self.tiling is None else TILED_CONTEXT

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
        parts = ((one.config, two.config), (self.vision, other.vision), (self.tiling, other.tiling))
        if one.entry != two.entry or not all(_alike(*pair) for pair in parts):
            return False
        return self.model_copy(update={"decoder": two, "vision": other.vision, "tiling": other.tiling}) == other


def _alike(one: Any, other: Any) -> bool:
    computes_like = getattr(one, "computes_like", None)
    return bool(computes_like(other)) if callable(computes_like) and other is not None else bool(one == other)
