"""What the sections of vision towers share: fields that mean the same in every family. Imports no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from mplug_nn.decoders.parts import ActivationName, BlockConfig, MLPConfig, NormConfig, tower_block
from mplug_nn.rotary import Rotary


class TowerConfig(BaseModel):
    """The base of a section that describes a vision tower; a family gives each field its default and description.

    `num_layers` equal blocks with norms, attention without a mask, and an MLP with biases read patches of `patch_size`
    pixels in `channels` colours. `beside` are the fields that do not decide what the tower computes from patches.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    beside: ClassVar[frozenset[str]] = frozenset()
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    ffn_hidden_size: PositiveInt
    activation: ActivationName
    norm_eps: PositiveFloat
    patch_size: PositiveInt
    channels: PositiveInt
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]

    def computes_like(self, other: "TowerConfig") -> bool:
        """Whether two towers of a family compute the same from the same patches."""
        return self.computed() == other.computed()

    def computed(self) -> dict[str, Any]:
        """The fields that decide what the tower computes."""
        return self.model_dump(exclude=set(self.beside))

    @property
    def patch_width(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.patch_size**2

    def norm_config(self) -> NormConfig:
        """The norms of the blocks."""
        return NormConfig("layernorm", self.norm_eps, bias=True)

    def block_config(self, rotary: Rotary | None = None) -> BlockConfig:
        """A block of the tower; they are equal."""
        mlp = MLPConfig(self.ffn_hidden_size, self.activation, bias=True)
        return tower_block(self.norm_config(), self.hidden_size, self.num_attention_heads, mlp, rotary)


def square_side(values: Mapping[str, Any]) -> int:
    """The side of the square that a preprocessor file asks for; ValueError if its field 'size' is of another form."""
    size = values["size"]
    if set(size) != {"height", "width"} or size["height"] != size["width"]:
        raise ValueError(f"its field 'size' is {size}, and the family reads equal 'height' and 'width'")
    side: int = size["height"]
    return side


def colours_of(values: Mapping[str, Any], name: str = "pixel") -> dict[str, tuple[float, ...]]:
    """Our settings of the colours in a preprocessor file: the means and standard deviations of `name`."""
    return {f"{name}_mean": tuple(values["image_mean"]), f"{name}_std": tuple(values["image_std"])}
