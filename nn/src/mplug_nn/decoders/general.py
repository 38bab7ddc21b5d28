"""The config of a family of decoders that can set everything the shared blocks offer."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mplug_nn.decoders.hybrid import HybridDecoderConfig
from mplug_nn.decoders.parts import (
    ActivationName,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    MLPConfig,
    NormConfig,
    NormName,
    PartConfig,
)
from mplug_nn.rotary import Rotary

RopeScaling = dict[str, bool | int | float | str | tuple[float, ...]]
"""The name of a scaling of rotary positions as 'type', and its options."""


class GeneralDecoderConfig(HybridDecoderConfig):
    """The base of the `Config` of a family whose blocks are the shared ones; a family sets other defaults.

    Blocks may differ. Each list has an entry per block, or fewer entries, which then repeat. With `num_experts` 0, the
    fields of experts have no effect.
    """

    num_experts: NonNegativeInt = Field(0, description="experts of a block; 0: every block has an MLP")
    activation: ActivationName = Field("swiglu", description="activation of MLPs and experts")
    norm: NormName = Field(
        "rmsnorm", description="norm before each part of a block, and before the head; an offset applies to QK-norm too"
    )
    post_norms: bool = Field(False, description="also a norm of the output of each part of a block")
    tie_embeddings: bool = Field(False, description="use the embedding table as the output projection")
    scale_embeddings: bool = Field(False, description="multiply the embeddings by the square root of hidden_size")
    qkv_bias: bool = Field(False, description="biases of the projections to queries, keys and values")
    attention_out_bias: bool = Field(False, description="bias of attention's output projection")
    mlp_bias: bool = Field(False, description="biases of the MLPs' projections")
    expert_projection_bias: bool = Field(False, description="biases of the experts' projections")
    attention_scale: PositiveFloat | None = Field(
        None, description="factor of attention scores; null: 1 / sqrt(head_dim)"
    )
    attention_soft_cap: PositiveFloat | None = Field(None, description="c: attention scores become c tanh(score / c)")
    logit_soft_cap: PositiveFloat | None = Field(None, description="c: the model's logits become c tanh(logit / c)")
    attention_sinks: bool = Field(False, description="a trained score without a value for each head")
    attention_output_gate: bool = Field(False, description="a sigmoid of the token weighs attention's output")
    window: PositiveInt | None = Field(None, description="positions that blocks of the type 'window' see")
    attention_types: tuple[Literal["full", "window"], ...] = Field(
        ("full",), min_length=1, description="attention of each block: whole sequences, or windows"
    )
    position_types: tuple[Literal["rotary", "none"], ...] = Field(
        ("rotary",), min_length=1, description="positions of each block: rotary, or none"
    )
    feed_forward_types: tuple[Literal["mlp", "experts"], ...] | None = Field(
        None, min_length=1, description="feed-forward part of each block; null: by num_dense_layers and num_experts"
    )
    rope_scaling: RopeScaling | None = Field(
        None,
        description="scaling of rotary positions: its name as 'type' (linear, llama3, longrope, yarn), and its options",
    )
    rope_fraction: float = Field(1.0, gt=0, le=1, description="share of each head that is rotated, from its beginning")
    rope_interleaved: bool = Field(False, description="rotate neighbouring coordinates, not those of a head's halves")
    window_rope_theta: PositiveFloat | None = Field(
        None, description="base of the rotary frequencies in blocks with windows, without scaling; null: as elsewhere"
    )

    num_mtp_layers: NonNegativeInt = Field(
        0, description="blocks that predict tokens further ahead in training (multi-token prediction)"
    )
    mtp_loss_coefficient: NonNegativeFloat = Field(
        0.3, description="weight of the mean loss of multi-token prediction's blocks"
    )

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        for name in ("attention_types", "position_types", "feed_forward_types"):
            listed = getattr(self, name) or ()
            if len(listed) > self.num_layers:
                raise ValueError(f"{name} has {len(listed)} entries, and num_layers is {self.num_layers}")
        windows = {self.entry("attention_types", number) for number in range(self.num_layers)}
        if "window" in windows and self.window is None:
            raise ValueError("attention_types has blocks with windows; set window")
        if "experts" in (self.feed_forward_types or ()) and not self.num_experts:
            raise ValueError(
                "feed_forward_types has blocks with experts, and num_experts is 0; set num_experts, or change "
                "feed_forward_types"
            )
        self.rotary().turns(self.rotary_width)  # raises ValueError for options that cannot be computed with
        return self

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that `rotary` turns, or a share of it."""
        return self.head_width

    def entry(self, name: str, number: int) -> str:
        """The entry of a list for block `number`."""
        listed: tuple[str, ...] = getattr(self, name)
        return listed[number % len(listed)]

    def rotary(self) -> Rotary:
        """The rotary positions of blocks without windows."""
        options: dict[str, Any] = dict(self.rope_scaling or {})
        scaling = str(options.pop("type", ""))
        if options and not scaling:
            raise ValueError("rope_scaling needs the name of a scaling as 'type'")
        width = None if self.rope_fraction == 1 else round(self.head_width * self.rope_fraction)
        return Rotary(self.rope_theta, scaling, tuple(sorted(options.items())), width, self.rope_interleaved)

    def norm_config(self) -> NormConfig:
        """The norm of the field `norm`."""
        return NormConfig(self.norm, self.norm_eps)

    def embedding_config(self) -> EmbeddingConfig:
        """Tokens alone."""
        scale = float(self.hidden_size**0.5) if self.scale_embeddings else 1.0
        return EmbeddingConfig(tied=self.tie_embeddings, scale=scale)

    @property
    def depths_ahead(self) -> int:
        """Depths of multi-token prediction."""
        return self.num_mtp_layers

    @property
    def ahead_coefficient(self) -> float:
        """The weight of the loss of multi-token prediction."""
        return self.mtp_loss_coefficient

    @property
    def output_soft_cap(self) -> float | None:
        """The soft cap of the logits."""
        return self.logit_soft_cap

    def attention_of(self, number: int) -> PartConfig:
        """The attention of block `number`."""
        windowed = self.entry("attention_types", number) == "window"
        rotary: float | Rotary | None = self.rotary()
        if windowed and self.window_rope_theta is not None:
            rotary = replace(self.rotary(), theta=self.window_rope_theta, scaling="", options=())
        if self.entry("position_types", number) == "none":
            rotary = None
        attention: AttentionConfig = self.attention_config()
        scale = None if self.attention_scale == self.head_width**-0.5 else self.attention_scale  # None is that factor
        return replace(
            attention,
            theta=rotary,
            bias=self.qkv_bias,
            out_bias=self.attention_out_bias,
            window=self.window if windowed else None,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
            output_gate=self.attention_output_gate,
            scale=scale,
            qk_norm_offset=self.norm.startswith("offset_"),
        )

    def has_experts(self, number: int) -> bool:
        """Whether block `number` has experts."""
        if self.feed_forward_types is not None:
            return self.entry("feed_forward_types", number) == "experts"
        return self.num_experts > 0 and number >= self.num_dense_layers

    def block_config(self, number: int) -> PartConfig:
        """A block by the lists of this class."""
        dense = MLPConfig(self.ffn_hidden_size, self.activation, self.mlp_bias)
        experts = replace(self.experts_config(), kind=self.activation, bias=self.expert_projection_bias)
        feed_forward: PartConfig = experts if self.has_experts(number) else dense
        mixer = self.scan_config(number) or self.attention_of(number)
        return BlockConfig(self.norm_config(), mixer, feed_forward, post_norms=self.post_norms)
