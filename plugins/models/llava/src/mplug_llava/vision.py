"""The section 'model.vision': the shape of the tower, and how pictures are prepared for it. Imports no torch."""

from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from mplug_nn import ActivationName, TowerConfig

PATCHES = "patches"
"""The axis along which the rows of the tower's units lie."""
CONTEXT = {
    "patches": ("packs", PATCHES, "pixels"),
    "patch_places": ("packs", PATCHES),
    "patch_lengths": ("packs", "pictures"),
    "vision_rows": ("batch", "sequence"),
}
"""The entries of a micro batch with pictures, and their axes."""
CORNERS = 4
"""Rows of the tower whose weighted sum stands in the place of a token, if pictures are tiled."""
TILED_CONTEXT = {
    **CONTEXT,
    "vision_rows": ("batch", "sequence", "corner"),
    "vision_shares": ("batch", "sequence", "corner"),
}
"""The entries of a micro batch with tiled pictures, and their axes."""


class VisionConfig(TowerConfig):
    """The tower of LLaVA-1.5 by default: CLIP ViT-L/14 for pictures of 336 x 336 pixels.

    SigLIP has no class row, no norm before the first block, and biases of patches.
    """

    beside: ClassVar[frozenset[str]] = frozenset({"init_std", "fit", "pixel_mean", "pixel_std", "typical_pictures"})
    num_layers: PositiveInt = Field(24, le=10_000, description="transformer blocks that the tower has")
    feature_layer: int = Field(
        -2, description="block whose output the projector takes: -1 is the last one; later ones are kept, and unused"
    )
    hidden_size: PositiveInt = Field(1024, description="width of the tower")
    num_attention_heads: PositiveInt = Field(16, description="heads of the tower")
    ffn_hidden_size: PositiveInt = Field(4096, description="width of the tower's MLPs")
    activation: ActivationName = Field("quick_gelu", description="activation of the tower's MLPs")
    norm_eps: PositiveFloat = Field(1e-5, description="added in the tower's norms to the variance")
    init_std: NonNegativeFloat = Field(0.02, description="standard deviation of the tower's initial weights")
    image_size: PositiveInt = Field(336, description="side of the square of pixels that the tower sees")
    patch_size: PositiveInt = Field(14, description="rows and columns of a patch, in pixels")
    channels: PositiveInt = Field(3, description="colours of a pixel")
    class_row: bool = Field(True, description="a trained row before the patches of a picture (CLIP)")
    patch_bias: bool = Field(False, description="bias of the projection of patches")
    norm_before: bool = Field(True, description="a norm before the first block")
    features: Literal["patches", "all"] = Field(
        "patches", description="rows of a picture that stand in the text: those of patches, or the class row too"
    )
    pooling_head: bool = Field(
        False, description="the tower has SigLIP's head, which is kept for an export, and unused"
    )
    fit: Literal["crop", "stretch"] = Field(
        "crop",
        description="how a picture becomes a square: its middle is cropped (CLIP), or it is stretched (SigLIP)",
    )
    pixel_mean: tuple[float, float, float] = Field(
        (0.48145466, 0.4578275, 0.40821073), description="means of the colours, between 0 and 1"
    )
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.26862954, 0.26130258, 0.27577711), description="standard deviations of the colours"
    )
    typical_pictures: PositiveInt = Field(
        1, description="pictures, or tiles of them, of a sample: by them a pipeline is split and memory is estimated"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"vision: num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )
        if self.patch_size > self.image_size:
            raise ValueError(f"vision: patch_size={self.patch_size} is larger than image_size={self.image_size}")
        if not (-self.num_layers <= self.feature_layer <= -1 or 1 <= self.feature_layer <= self.num_layers):
            raise ValueError(
                f"vision: feature_layer={self.feature_layer} must be between 1 and num_layers={self.num_layers}, or "
                f"the same counted from the end (-1: the last block)"
            )
        if self.patch_bias and self.class_row:
            raise ValueError(
                "vision: patch_bias cannot be used with class_row, which is the embedding of a patch of zeros"
            )
        if self.features == "all" and not self.class_row:
            raise ValueError("vision: features='all' has no effect without class_row")
        return self

    @property
    def used_layers(self) -> int:
        """The number of blocks that run."""
        return self.feature_layer if self.feature_layer > 0 else self.num_layers + 1 + self.feature_layer

    @property
    def side(self) -> int:
        """Patches along a side of a picture; pixels beyond the last whole patch are not seen."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """The rows of a picture in the tower: its patches, after the class row if there is one."""
        return self.side**2 + self.class_row

    @property
    def seen_rows(self) -> range:
        """The rows of a picture that stand in the text."""
        return range(1 if self.class_row and self.features == "patches" else 0, self.num_rows)
