"""The config of Qwen-VL: the fields of every decoder, positions of several coordinates, and the tower."""

from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mplug_nn import DivisionName, GeneralDecoderConfig, Rotary
from mplug_pretrained import ExternalNames
from mplug_qwen_vl.names import external_names
from mplug_qwen_vl.vision import VisionConfig

COORDINATES = 3
"""Time, row and column."""


class QwenVLConfig(GeneralDecoderConfig):
    """The shape of decoder and tower; the defaults are those of Qwen3-VL without a tower.

    The decoder of Qwen2.5-VL has `qkv_bias` and no `qk_norm`.
    """

    vocab_size: PositiveInt = Field(151936, description="tokens that the model knows")
    rope_theta: PositiveFloat = Field(5e6, description="base of the rotary frequencies")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
    qk_norm: bool = Field(True, description="RMSNorm on the queries and keys of each head")
    aux_loss_coefficient: float = Field(0.001, ge=0, description="weight of the balancing loss")
    rope_division: DivisionName | None = Field(
        None, description="which pairs turn by time, by row and by column; null: tokens have one position"
    )
    rope_sections: tuple[PositiveInt, ...] = Field(
        (), description="numbers of pairs that turn by time, by row and by column"
    )
    vision: VisionConfig | None = Field(None, description="the tower that sees; null: a decoder of text alone")

    @model_validator(mode="after")
    def _tower_fits(self) -> Self:
        vision = self.vision
        if self.rope_sections and self.rope_division is None:
            raise ValueError("rope_sections has no effect without rope_division")
        if vision is None:
            return self
        if self.rope_division is None or len(self.rope_sections) != COORDINATES:
            raise ValueError("a decoder with a tower needs rope_division, and three numbers as rope_sections")
        if len(vision.deepstack_blocks) > self.num_layers:
            raise ValueError(
                f"vision: deepstack_blocks has {len(vision.deepstack_blocks)} entries, one for each of the first "
                f"decoder blocks, and num_layers is {self.num_layers}"
            )
        if self.num_mtp_layers:
            raise ValueError(
                f"num_mtp_layers={self.num_mtp_layers} cannot be used with a tower: the tokens ahead may be those of "
                f"an image, which have no embedding"
            )
        return self

    def rotary(self) -> Rotary:
        """The rotary positions of blocks without windows."""
        plain = super().rotary()
        return replace(plain, division=self.rope_division, sections=self.rope_sections) if self.rope_division else plain

    def _computed(self) -> tuple[object, ...]:
        vision = self.vision
        return *super()._computed(), vision and vision.computed()

    def external_names(self) -> ExternalNames:
        """The names of Qwen2.5-VL, Qwen3-VL or Qwen3-VL-MoE."""
        return external_names(self, self.vision)
