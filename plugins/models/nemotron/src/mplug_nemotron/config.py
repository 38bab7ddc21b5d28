"""The config of Nemotron: the fields of every decoder, and the pattern of its blocks."""

import math
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from mplug_nemotron.names import names_of
from mplug_nn import (
    ActivationName,
    BranchConfig,
    BranchesConfig,
    GeneralDecoderConfig,
    MLPConfig,
    PartConfig,
    ScanConfig,
    ScoreName,
)
from mplug_pretrained import ExternalNames

UNUSED = ("mixer_types", "feed_forward_types", "num_dense_layers", "post_norms")
"""Fields of blocks with two parts."""


class NemotronConfig(GeneralDecoderConfig):
    """The shape of the decoder. `pattern` has a letter per block, or fewer letters, which then repeat.

    A depth of multi-token prediction has a part for each letter of `mtp_pattern`.
    """

    vocab_size: PositiveInt = Field(131072, description="tokens that the model knows")
    pattern: str = Field(
        "M*-",
        pattern=r"^[ME*-]+$",
        description="part of each block: M Mamba-2, * attention, - an MLP, E experts; fewer letters repeat",
    )
    mtp_pattern: str = Field(
        "*E", pattern=r"^[ME*-]+$", description="parts of each depth of multi-token prediction, by the same letters"
    )
    activation: ActivationName = Field("relu2", description="activation of MLPs and experts")
    position_types: tuple[Literal["rotary", "none"], ...] = Field(
        ("none",), min_length=1, description="positions of each block: rotary, or none"
    )
    time_step_min: NonNegativeFloat = Field(0.001, description="least time step of Mamba-2")
    moe_router_score: ScoreName = Field("sigmoid", description="logits to scores, over experts")
    aux_loss_coefficient: NonNegativeFloat = Field(1e-4, description="weight of the balancing loss")
    expert_bias_rate: NonNegativeFloat = Field(
        1e-3, description="step of the bias that balances the choice without a loss; 0: it does not change"
    )

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        defaults = type(self).model_fields
        for name in UNUSED:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name}={getattr(self, name)} does not apply to blocks of one part; set pattern")
        if len(self.pattern) > self.num_layers:
            raise ValueError(f"pattern has {len(self.pattern)} letters, and num_layers is {self.num_layers}")
        ahead = self.mtp_pattern if self.num_mtp_layers else ""
        for name, letters in (("pattern", self.pattern), ("mtp_pattern", ahead)):
            if "E" in letters and not self.num_experts:
                raise ValueError(
                    f"{name} has blocks with experts (E), and num_experts is 0; set num_experts, or change {name}"
                )
        if "M" in self.pattern + ahead and self.linear_value_heads % self.linear_key_heads:
            heads = self.linear_value_heads
            raise ValueError(f"linear_num_key_heads={self.linear_key_heads} does not divide the {heads} value heads")
        return self

    def letter(self, number: int) -> str:
        """The part of block `number`. The parts of all depths of multi-token prediction follow those of the model."""
        ahead = number - self.num_layers
        if ahead >= 0:
            return self.mtp_pattern[ahead % len(self.mtp_pattern)]
        return self.pattern[number % len(self.pattern)]

    def parts_ahead(self, depth: int) -> range:
        """The numbers of the parts of a depth of multi-token prediction."""
        first = self.num_layers + depth * len(self.mtp_pattern)
        return range(first, first + len(self.mtp_pattern))

    def mixer_type(self, number: int) -> Literal["attention", "mamba2"]:
        """What mixes the tokens in block `number`, if something does."""
        return "mamba2" if self.letter(number) == "M" else "attention"

    def has_experts(self, number: int) -> bool:
        """Whether block `number` has experts."""
        return self.letter(number) == "E"

    def scan_config(self, number: int) -> ScanConfig | None:
        """The Mamba-2 of block `number`; None if the block has none."""
        scan = super().scan_config(number)
        return None if scan is None else replace(scan, time_step_limit=(self.time_step_min, math.inf))

    def block_config(self, number: int) -> PartConfig:
        """A block of one part; a depth of multi-token prediction has several."""
        if number < self.num_layers:
            return self._branch(number)
        return BranchesConfig(tuple(self._branch(part) for part in self.parts_ahead(number - self.num_layers)))

    def _branch(self, number: int) -> BranchConfig:
        return BranchConfig(self.norm_config(), self._part(number))

    def _part(self, number: int) -> PartConfig:
        match self.letter(number):
            case "E":
                return replace(self.experts_config(), kind=self.activation, bias=self.expert_projection_bias)
            case "-":
                return MLPConfig(self.ffn_hidden_size, self.activation, self.mlp_bias)
            case _:
                return self.scan_config(number) or self.attention_of(number)

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        depths = [self.parts_ahead(depth) for depth in range(self.num_mtp_layers)]
        numbers = range(self.num_layers + len(self.mtp_pattern) * len(depths))
        return names_of(self, "".join(map(self.letter, numbers)), depths)
