"""The config of a family of decoders with latent attention (MLA, arXiv 2405.04434, section 2.1)."""

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from mplug_nn.decoders.general import GeneralDecoderConfig
from mplug_nn.decoders.parts import LatentAttentionConfig


class LatentDecoderConfig(GeneralDecoderConfig):
    """The base of the `Config` of a family with latent attention. The widths of heads are those of this attention.

    The fields of other attentions are refused (`OTHER_ATTENTION`).
    """

    OTHER_ATTENTION: ClassVar[tuple[str, ...]] = (
        *("num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "attention_out_bias", "window_rope_theta"),
        "attention_output_gate",
    )

    q_lora_rank: PositiveInt | None = Field(1536, description="width of the queries' latent vector; null: none")
    kv_lora_rank: PositiveInt = Field(512, description="width of the latent vector of keys and values")
    qk_nope_head_dim: PositiveInt = Field(128, description="width of the part of a key without positions")
    qk_rope_head_dim: PositiveInt = Field(64, description="width of the part of a key with rotary positions")
    v_head_dim: PositiveInt = Field(128, description="width of a value")

    @model_validator(mode="after")
    def _latent_attention_fits(self) -> Self:
        defaults = type(self).model_fields
        for name in self.OTHER_ATTENTION:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name}={getattr(self, name)} does not apply to latent attention; remove it")
        if self.rope_fraction != 1:
            raise ValueError("rope_fraction does not apply to latent attention; set qk_rope_head_dim")
        return self

    @property
    def head_width(self) -> int:
        """Width of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_width(self) -> int:
        """Width of the part of a key with rotary positions."""
        return self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The factor of attention scores; YaRN multiplies it (arXiv 2405.04434, section 3.1.4)."""
        return self.attention_scale or float(self.head_width**-0.5 * self.rotary().score_factor)

    def attention_of(self, number: int) -> LatentAttentionConfig:
        """The attention of block `number`."""
        rotary = replace(self.rotary(), width=None)
        windowed = self.entry("attention_types", number) == "window"
        return LatentAttentionConfig(
            num_heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            key_width=self.qk_nope_head_dim,
            rotary_width=self.qk_rope_head_dim,
            value_width=self.v_head_dim,
            rotary=rotary if self.entry("position_types", number) == "rotary" else None,
            scale=self.scale,
            window=self.window if windowed else None,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
        )
