"""The section 'model.vision': the shape of the tower. Imports no torch."""

from math import isqrt
from typing import ClassVar, Self

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

from mplug import WHOLE_SEQUENCE
from mplug_nn import ActivationName, TowerConfig

PATCHES = "patches"
"""The axis along which the rows of the tower's units lie."""
CONTEXT = {
    "patches": ("packs", PATCHES, "pixels"),
    "patch_places": ("packs", PATCHES, "place"),
    "patch_lengths": ("packs", "frames"),
    "vision_rows": ("batch", "sequence"),
    "position_groups": ("batch", WHOLE_SEQUENCE),
}
"""The entries of a micro batch with images, and their axes. Every rank has the groups of whole sequences."""


class PanAndScan(BaseModel):
    """Which pictures are also seen by crops, side by side along the longer side. Each crop is a picture of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_ratio: PositiveFloat = Field(1.2, description="ratio of the sides from which on a picture has crops")
    min_crop_size: PositiveInt = Field(256, description="a picture whose crops would have a shorter side has none")
    max_crops: PositiveInt = Field(4, description="crops of a picture at most")


class VisionConfig(TowerConfig):
    """The tower of Gemma 3: SigLIP (arXiv 2303.15343) over square pictures of one size, and pooling of its rows."""

    beside: ClassVar[frozenset[str]] = frozenset(
        {"init_std", "typical_images", "pixel_mean", "pixel_std", "blank_line_token", "pan_and_scan"}
    )
    num_layers: PositiveInt = Field(27, le=10_000, description="transformer blocks of the tower")
    hidden_size: PositiveInt = Field(1152, description="width of the tower")
    num_attention_heads: PositiveInt = Field(16, description="heads of the tower")
    ffn_hidden_size: PositiveInt = Field(4304, description="width of the tower's MLPs")
    activation: ActivationName = Field("gelu_tanh", description="activation of the tower's MLPs")
    norm_eps: PositiveFloat = Field(1e-6, description="added in the tower's norms to the variance or mean square")
    init_std: NonNegativeFloat = Field(0.02, description="standard deviation of the tower's initial weights")
    image_size: PositiveInt = Field(896, description="side of the square to which pictures are resized, in pixels")
    patch_size: PositiveInt = Field(14, description="rows and columns of a patch, in pixels")
    channels: PositiveInt = Field(3, description="colours of a pixel")
    tokens_per_image: PositiveInt = Field(256, description="tokens that stand for a picture: a square number")
    pixel_mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="means of the colours, between 0 and 1")
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.5, 0.5, 0.5), description="standard deviations of the colours"
    )
    typical_images: PositiveInt = Field(
        1, description="pictures of a sample, by which a pipeline is split and memory is estimated"
    )
    image_token: NonNegativeInt = Field(262144, description="token in whose place a row of a picture stands")
    start_token: NonNegativeInt = Field(255999, description="token before a picture")
    end_token: NonNegativeInt = Field(256000, description="token after a picture")
    blank_line_token: NonNegativeInt | None = Field(
        108, description="token of a blank line before start_token and after end_token; null: none"
    )
    pan_and_scan: PanAndScan | None = Field(
        None, description="long pictures are seen by crops too, with a text around them; null: no crops"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        heads, width, side = self.num_attention_heads, self.hidden_size, isqrt(self.tokens_per_image)
        if width % heads:
            raise ValueError(f"vision: num_attention_heads={heads} does not divide hidden_size={width}")
        if self.image_size % self.patch_size:
            raise ValueError(f"vision: patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if side * side != self.tokens_per_image:
            raise ValueError(f"vision: tokens_per_image={self.tokens_per_image} is not a square number")
        if self.patches_per_side % side:
            raise ValueError(
                f"vision: tokens_per_image={self.tokens_per_image} is {side} rows of tokens, which do not divide the "
                f"{self.patches_per_side} rows of patches of a picture"
            )
        if self.pan_and_scan is not None and self.blank_line_token is None:
            raise ValueError("vision: pan_and_scan needs blank_line_token: its crops have blank lines between them")
        return self

    @property
    def patches_per_side(self) -> int:
        """The rows of patches of a picture, which has as many columns."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """The patches of a picture."""
        return self.patches_per_side**2

    @property
    def pool_side(self) -> int:
        """The side of the square of patches whose mean is one row."""
        return self.patches_per_side // isqrt(self.tokens_per_image)
