"""The section 'model.vision': the shape of the tower. Imports no torch."""

from math import prod
from typing import ClassVar, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mplug_nn import ActivationName, BlockConfig, NormConfig, NormName, Rotary, TowerConfig

PATCHES = "patches"
"""The axis along which the rows of the tower's units lie."""
CONTEXT = {
    "patches": ("packs", PATCHES, "pixels"),
    "patch_places": ("packs", PATCHES, "place"),
    "patch_lengths": ("packs", "frames"),
    "window_lengths": ("packs", "windows"),
    "vision_rows": ("batch", "sequence"),
    "coordinates": ("batch", "sequence", "coordinate"),
}
"""The entries of a micro batch with images, and their axes."""


class VisionConfig(TowerConfig):
    """The tower of Qwen3-VL by default. Qwen2.5-VL has windows, RMSNorm, a gated MLP, and no learned positions."""

    beside: ClassVar[frozenset[str]] = frozenset(
        {
            *("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels"),
            *("pixel_mean", "pixel_std", "typical_patches", "init_std"),
        }
    )
    num_layers: PositiveInt = Field(27, le=10_000, description="transformer blocks of the tower")
    hidden_size: PositiveInt = Field(1152, description="width of the tower")
    num_attention_heads: PositiveInt = Field(16, description="heads of the tower")
    ffn_hidden_size: PositiveInt = Field(4304, description="width of the tower's MLPs")
    activation: ActivationName = Field("gelu_tanh", description="activation of the tower's MLPs")
    norm: NormName = Field("layernorm", description="norm of the tower's blocks and mergers")
    norm_bias: bool = Field(True, description="biases of the tower's norms")
    norm_eps: PositiveFloat = Field(1e-6, description="added in the tower's norms to the variance or mean square")
    init_std: NonNegativeFloat = Field(0.02, description="standard deviation of the tower's initial weights")
    patch_size: PositiveInt = Field(16, description="rows and columns of a patch, in pixels")
    patch_frames: PositiveInt = Field(2, description="frames of a patch; a still image is repeated")
    channels: PositiveInt = Field(3, description="colours of a pixel")
    patch_bias: bool = Field(True, description="bias of the projection of patches")
    position_grid: PositiveInt | None = Field(
        48, description="side of the square of learned positions, stretched over each frame; null: none"
    )
    rope_theta: PositiveFloat = Field(10000.0, description="base of the rotary frequencies of rows and columns")
    merge_size: PositiveInt = Field(2, description="side of the square of patches that become one row of the decoder")
    window_size: PositiveInt | None = Field(
        None, description="side of attention's windows in pixels; null: a patch sees its whole frame"
    )
    full_attention_blocks: tuple[NonNegativeInt, ...] = Field(
        (), description="blocks of the tower without windows, if window_size is set"
    )
    deepstack_blocks: tuple[NonNegativeInt, ...] = Field(
        (8, 16, 24), description="blocks whose merged output is added after the first decoder blocks (DeepStack)"
    )
    tokens_per_second: PositiveInt | None = Field(
        None, description="positions in time per second of a video; null: each frame has a place of its own in the text"
    )
    min_pixels: PositiveInt = Field(65536, description="smallest area to which a picture is resized, in pixels")
    max_pixels: PositiveInt = Field(16777216, description="largest area to which a picture is resized, in pixels")
    video_min_pixels: PositiveInt | None = Field(
        None,
        description="smallest area of a video in pixels: of a frame with tokens_per_second, otherwise of all frames "
        "together; null: min_pixels",
    )
    video_max_pixels: PositiveInt | None = Field(
        None,
        description="largest area of a video in pixels: of a frame with tokens_per_second, otherwise of all frames "
        "together; null: max_pixels",
    )
    pixel_mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="means of the colours, between 0 and 1")
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.5, 0.5, 0.5), description="standard deviations of the colours"
    )
    typical_patches: PositiveInt = Field(
        1024, description="patches of a sample, by which a pipeline is split and memory is estimated"
    )
    image_token: NonNegativeInt = Field(151655, description="token in whose place a row of an image stands")
    video_token: NonNegativeInt = Field(151656, description="token in whose place a row of a video stands")
    start_token: NonNegativeInt = Field(151652, description="token before an image or a video")
    end_token: NonNegativeInt = Field(151653, description="token after an image or a video")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads or (width // heads) % 4:
            raise ValueError(
                f"vision: num_attention_heads={heads} must divide hidden_size={width} into widths that 4 divides, "
                f"because half of the pairs of a head turn by rows and half by columns"
            )
        for name in ("full_attention_blocks", "deepstack_blocks"):
            numbers = getattr(self, name)
            if list(numbers) != sorted(set(numbers)) or any(number >= self.num_layers for number in numbers):
                raise ValueError(
                    f"vision: {name}={list(numbers)} must be ascending numbers of blocks below {self.num_layers}"
                )
        if self.full_attention_blocks and self.window_size is None:
            raise ValueError("vision: full_attention_blocks has no effect without window_size")
        if self.window_size is not None and self.window_side < 1:
            raise ValueError(
                f"vision: window_size={self.window_size} pixels are less than a merged square of "
                f"{self.merge_size * self.patch_size}"
            )
        return self

    @property
    def video_bounds(self) -> tuple[int, int]:
        """The smallest and the largest area of a video in pixels."""
        return self.video_min_pixels or self.min_pixels, self.video_max_pixels or self.max_pixels

    @property
    def window_side(self) -> int:
        """The side of a window in merged squares; 0 without windows."""
        return (self.window_size or 0) // self.merge_size // self.patch_size

    @property
    def patch_width(self) -> int:
        """The numbers of a patch."""
        return prod((self.channels, self.patch_frames, self.patch_size, self.patch_size))

    def has_window(self, number: int) -> bool:
        """Whether attention of block `number` of the tower sees a window only."""
        return self.window_size is not None and number not in self.full_attention_blocks

    def norm_config(self) -> NormConfig:
        """The norms of the blocks."""
        return NormConfig(self.norm, self.norm_eps, self.norm_bias)

    def block_config(self, rotary: Rotary | None = None) -> BlockConfig:
        """A block of the tower: they are equal, and differ only in the lengths that they are called with."""
        return super().block_config(rotary or Rotary(self.rope_theta, division="axial"))


def entries_of(config: VisionConfig) -> tuple[str, ...]:
    """The entries that a loader must supply for a model with this tower."""
    return tuple(name for name in CONTEXT if name != "window_lengths" or config.window_size is not None)
