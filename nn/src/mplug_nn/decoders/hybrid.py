"""The config of a family of decoders whose blocks mix tokens by attention or by a scan."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from mplug_nn.decoders.parts import ScanConfig
from mplug_nn.decoders.sparse import SparseDecoderConfig

MixerType = Literal["attention", "gated_delta", "mamba2", "kimi_delta", "gated_linear"]


class HybridDecoderConfig(SparseDecoderConfig):
    """The base of the `Config` of a family that can mix types of blocks; the fields `linear_*` are those of scans."""

    mixer_types: tuple[MixerType, ...] = Field(
        ("attention",),
        min_length=1,
        description="what mixes the tokens in each block: attention, or a scan (docs/mixers.md); fewer entries repeat",
    )
    linear_num_key_heads: PositiveInt | None = Field(
        None, description="key heads of scans, groups of mamba2; null: as many as value heads"
    )
    linear_num_value_heads: PositiveInt | None = Field(
        None, description="value heads of scans; null: as many as attention has query heads"
    )
    linear_key_head_dim: PositiveInt | None = Field(
        None, description="width of a key of scans, and of a state of mamba2; null: width of a head of attention"
    )
    linear_value_head_dim: PositiveInt | None = Field(
        None, description="width of a value of scans; null: width of a key"
    )
    linear_conv_width: PositiveInt = Field(4, ge=2, description="positions that the short convolution of scans sees")

    @model_validator(mode="after")
    def _mixers_fit(self) -> Self:
        if len(self.mixer_types) > self.num_layers:
            raise ValueError(f"mixer_types has {len(self.mixer_types)} entries, and num_layers is {self.num_layers}")
        keys, values = self.linear_key_heads, self.linear_value_heads
        alike = [kind for kind in ("kimi_delta", "gated_linear") if kind in self.mixer_types]
        if alike and keys != values:
            raise ValueError(f"{alike[0]} has as many key heads as value heads; set linear_num_key_heads={values}")
        if values % keys and set(self.mixer_types) != {"attention"}:
            raise ValueError(f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")
        return self

    @property
    def linear_value_heads(self) -> int:
        """Value heads of a scan."""
        return self.linear_num_value_heads or self.num_attention_heads

    @property
    def linear_key_heads(self) -> int:
        """Key heads of a scan."""
        return self.linear_num_key_heads or self.linear_value_heads

    def mixer_type(self, number: int) -> MixerType:
        """What mixes the tokens in block `number`. The blocks of multi-token prediction have attention."""
        return self.mixer_types[number % len(self.mixer_types)] if number < self.num_layers else "attention"

    def scan_config(self, number: int) -> ScanConfig | None:
        """The scan of block `number`; None if the block has attention."""
        kind = self.mixer_type(number)
        if kind == "attention":
            return None
        key_width = self.linear_key_head_dim or self.head_width
        return ScanConfig(
            kind=kind,
            num_key_heads=self.linear_key_heads,
            num_value_heads=self.linear_value_heads,
            key_width=key_width,
            value_width=self.linear_value_head_dim or key_width,
            conv_width=self.linear_conv_width,
            eps=self.norm_eps,
        )
