"""The config of a family of decoders: fields that all families have, and the list of blocks."""

from abc import ABC, abstractmethod
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from mplug.errors import suggest
from mplug_nn.decoders.parts import AttentionConfig, EmbeddingConfig, NormConfig, PartConfig
from mplug_pretrained.external import ExternalNames


class DecoderConfig(BaseModel, ABC):
    """The base of the `Config` of a family of decoders. A family adds its fields and implements `block_config`.

    It declares a field again to give it another default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: PositiveInt = Field(12, le=10_000, description="transformer blocks")
    hidden_size: PositiveInt = Field(768, description="width of the residual stream")
    num_attention_heads: PositiveInt = Field(12, description="query heads")
    num_kv_heads: PositiveInt | None = Field(None, description="key-value heads (GQA); null: as many as query heads")
    head_dim: PositiveInt | None = Field(None, description="width of a head; null: hidden_size / heads")
    vocab_size: PositiveInt = Field(50257, description="tokens that the model knows")
    rope_theta: PositiveFloat = Field(10000.0, description="base of the rotary frequencies")
    qk_norm: bool = Field(False, description="RMSNorm on the queries and keys of each head")
    norm_eps: PositiveFloat = Field(1e-5, description="added in norms to the variance, or to the mean square")
    init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")
    mup_base: dict[str, PositiveInt] | None = Field(
        None,
        examples=[{"hidden_size": 16}, {"hidden_size": 8}],
        description="maximal update parametrization (arXiv 2203.03466): the fields of this section, such as "
        "hidden_size, that are narrower in a base model; initial values, rates and factors in forward are such that "
        "its learning rate is also the best one here; null: the usual parametrization",
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.kv_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}; set head_dim"
            )
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} does not divide num_attention_heads={heads}")
        if self.has_rotary_positions and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_width}")
        return self

    @model_validator(mode="after")
    def _base_is_valid(self) -> Self:
        try:
            _ = self.base
        except ValidationError as error:
            reasons = "; ".join(self._reason(one["loc"], one["type"], one["msg"]) for one in error.errors())
            raise ValueError(f"mup_base describes no model: {reasons}") from None
        return self

    @classmethod
    def _reason(cls, location: tuple[int | str, ...], kind: str, message: str) -> str:
        """Why a field of `mup_base` does not fit, in our words if it is unknown."""
        field = ".".join(map(str, location))
        if kind == "extra_forbidden":
            message = f"the model has no such field{suggest(field, cls.model_fields)}"
        return f"{field}: {message}" if field else message.removeprefix("Value error, ")

    @property
    def base(self) -> Self | None:
        """The base model of `mup_base`: this one with other widths."""
        if self.mup_base is None:
            return None
        own = {name: getattr(self, name) for name in self.model_fields_set - {"mup_base"}}
        return type(self)(**{**own, **self.mup_base})

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of projections into the residual stream, unless a family overrides this.

        It falls with the number of blocks: init_std / sqrt(2 num_layers) (GPT-2, section 2.3).
        """
        return self.init_std / float((2 * self.num_layers) ** 0.5)

    @property
    def has_rotary_positions(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return True

    @property
    def output_soft_cap(self) -> float | None:
        """The soft cap of the logits; None unless a family overrides this."""
        return None

    @property
    def output_scale(self) -> float:
        """What the logits are multiplied by; 1 unless a family overrides this."""
        return 1.0

    @property
    def depths_ahead(self) -> int:
        """Depths of multi-token prediction; 0 unless a family overrides this."""
        return 0

    @property
    def ahead_coefficient(self) -> float:
        """The weight of the loss of multi-token prediction."""
        return 0.0

    @property
    def blocks(self) -> tuple[PartConfig, ...]:
        """The blocks, in order."""
        return tuple(self.block_config(number) for number in range(self.num_layers))

    @property
    def blocks_ahead(self) -> tuple[PartConfig, ...]:
        """The block of each depth of multi-token prediction: their numbers follow those of the model's blocks."""
        return tuple(self.block_config(self.num_layers + depth) for depth in range(self.depths_ahead))

    @abstractmethod
    def block_config(self, number: int) -> PartConfig:
        """Block `number` of 0 to num_layers - 1: a `BlockConfig`, or a config of your own. Blocks may differ."""

    def computes_like(self, other: "DecoderConfig") -> bool:
        """Whether two configs describe the same model, also if they spell it differently (a list that repeats)."""
        return type(self) is type(other) and self._computed() == other._computed()

    def _computed(self) -> tuple[object, ...]:
        sizes = self.hidden_size, self.vocab_size, self.init_std, self.depths_ahead, self.mup_base
        outside = self.output_soft_cap, self.output_scale, self.embedding_config(), self.norm_config()
        return *sizes, *outside, self.blocks, self.blocks_ahead

    def attention_config(self) -> AttentionConfig:
        """Attention by the fields of this class; use `dataclasses.replace` for more (a window, a bias)."""
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_width,
            theta=self.rope_theta if self.has_rotary_positions else None,
            qk_norm=self.qk_norm,
            eps=self.norm_eps,
        )

    def norm_config(self) -> NormConfig:
        """The norms of the blocks and of the head: RMSNorm, unless a family overrides this."""
        return NormConfig(eps=self.norm_eps)

    def embedding_config(self) -> EmbeddingConfig:
        """The embedding: tokens alone, not tied to the head, unless a family overrides this."""
        return EmbeddingConfig()

    def external_names(self) -> ExternalNames | None:
        """The tensors of published checkpoints that hold the parameters; None if this model has no published form."""
        return None
