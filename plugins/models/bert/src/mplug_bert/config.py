"""The configs of BERT and ModernBERT: their fields, and their parts as data. No torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from mplug import distinct
from mplug_nn import ActivationName, AttentionConfig, BlockConfig, MLPConfig, NormConfig

if TYPE_CHECKING:
    from mplug_bert.blocks import PostNormBlock


class EncoderConfig(BaseModel):
    """The fields that all encoders of this distribution have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: PositiveInt = Field(12, le=10_000, description="transformer blocks")
    hidden_size: PositiveInt = Field(768, description="width of the residual stream")
    num_attention_heads: PositiveInt = Field(12, description="heads of attention")
    vocab_size: PositiveInt = Field(30522, description="tokens that the model knows")
    ffn_hidden_size: PositiveInt = Field(3072, description="width of the MLP")
    activation: ActivationName = Field("gelu", description="activation of the MLP")
    norm_eps: PositiveFloat = Field(1e-12, description="added in norms to the variance")
    init_std: NonNegativeFloat = Field(0.02, description="standard deviation of initial weights")
    tie_embeddings: bool = Field(True, description="use the embedding table as the output projection")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    head: Literal["masked", "sequences", "tokens", "embedding"] = Field(
        "masked",
        description="what the model learns: masked tokens, the classes of texts or of tokens, or vectors of texts by "
        "a contrastive loss over all pairs of a step",
    )
    labels: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        (), description="names of the classes, in the order of their numbers, for the heads 'sequences' and 'tokens'"
    )
    classifier_dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout in the heads for classes; null: that of `dropout`"
    )
    pooling: Literal["first", "mean"] = Field(
        "first",
        description="the vector of a text, for the heads 'sequences' and 'embedding': that of its first position, or "
        "the mean over its positions",
    )
    temperature: PositiveFloat = Field(0.05, description="what cosines are divided by, for the head 'embedding'")

    @model_validator(mode="after")
    def _labels_fit(self) -> Self:
        has_classes = self.head in ("sequences", "tokens")
        if has_classes and len(self.labels) < 2:
            raise ValueError(f"head={self.head} needs labels: the names of at least two classes")
        if self.labels and not has_classes:
            raise ValueError(f"head={self.head} has no classes, and labels has names; set head, or leave labels out")
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )
        return self

    @property
    def dropout_of_classes(self) -> float:
        """Dropout in the heads for classes."""
        other: float = getattr(self, "dropout", 0.0)
        return other if self.classifier_dropout is None else self.classifier_dropout

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    def attention_config(self) -> AttentionConfig:
        """Attention in both directions, without positions and biases."""
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            head_dim=self.head_width,
            theta=None,
            causal=False,
            dropout=self.attention_dropout,
        )


@dataclass(frozen=True)
class PostNormConfig:
    """A block whose norms follow the residual additions: `PostNormBlock`."""

    norm: NormConfig
    attention: AttentionConfig
    mlp: MLPConfig
    dropout: float

    def build(self, hidden_size: int) -> "PostNormBlock":
        """The block."""
        from mplug_bert.blocks import PostNormBlock

        parts = (part.build(hidden_size) for part in (self.attention, self.norm, self.mlp, self.norm))
        return PostNormBlock(*parts, dropout=self.dropout)


class BertConfig(EncoderConfig):
    """The shape of BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692)."""

    max_position_embeddings: PositiveInt = Field(512, description="rows of the table of positions")
    position_offset: int = Field(
        0, ge=0, description="row of the first position; RoBERTa begins after its padding token's number, at row 2"
    )
    num_token_types: PositiveInt = Field(
        2, description="rows of the table of token types; without the entry 'token_types' every token is of type 0"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the embedding and of each part's output")

    @property
    def is_roberta(self) -> bool:
        """Whether the model is a RoBERTa: only its positions have an offset."""
        return self.position_offset > 0

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return self.max_position_embeddings - self.position_offset

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.longest < 1:
            raise ValueError(
                f"position_offset={self.position_offset} leaves no row of max_position_embeddings="
                f"{self.max_position_embeddings}"
            )
        return self

    def norm_config(self) -> NormConfig:
        """All norms."""
        return NormConfig("layernorm", self.norm_eps, bias=True)

    def block_configs(self) -> tuple[PostNormConfig, ...]:
        """The blocks, in order."""
        attention = replace(self.attention_config(), bias=True)
        mlp = MLPConfig(self.ffn_hidden_size, self.activation, bias=True)
        return (PostNormConfig(self.norm_config(), attention, mlp, self.dropout),) * self.num_layers


class ModernBertConfig(EncoderConfig):
    """The shape of ModernBERT (arXiv 2412.13663)."""

    num_layers: PositiveInt = Field(22, le=10_000, description="transformer blocks")
    vocab_size: PositiveInt = Field(50368, description="tokens that the model knows")
    ffn_hidden_size: PositiveInt = Field(1152, description="width of the MLP, behind the gate")
    activation: ActivationName = Field("geglu", description="activation of the MLP")
    norm_eps: PositiveFloat = Field(1e-5, description="added in norms to the variance")
    attention_types: tuple[Literal["full", "window"], ...] = Field(
        ("full", "window", "window"), min_length=1, description="attention of the blocks; a shorter list repeats"
    )
    window: NonNegativeInt = Field(
        64, description="positions to each side that a position sees in blocks with windows, beside itself"
    )
    rope_theta: PositiveFloat = Field(160000.0, description="base of the rotary frequencies")
    window_rope_theta: PositiveFloat = Field(
        10000.0, description="base of the rotary frequencies in blocks with windows"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the embedding")
    norm_bias: bool = Field(False, description="add biases to layer norms")
    attention_bias: bool = Field(False, description="add biases to the projections of attention")
    mlp_bias: bool = Field(False, description="add biases to the projections of the MLP")
    head_activation: ActivationName = Field("gelu", description="activation of the head's transform")
    head_bias: bool = Field(False, description="add a bias to the head's transform")
    output_bias: bool = Field(True, description="add a bias to the logits")

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.head_width % 2:
            raise ValueError(f"rotary positions need heads of an even width, not {self.head_width}")
        return self

    def has_window(self, number: int) -> bool:
        """Whether a block's attention has a window."""
        return self.attention_types[number % len(self.attention_types)] == "window"

    def norm_config(self) -> NormConfig:
        """All norms."""
        return NormConfig("layernorm", self.norm_eps, self.norm_bias)

    def block_configs(self) -> tuple[BlockConfig, ...]:
        """The blocks, in order; the first one has no norm before attention, because the embedding ends in one."""
        return tuple(self._block(number) for number in range(self.num_layers))

    def _block(self, number: int) -> BlockConfig:
        is_local = self.has_window(number)
        attention = replace(
            self.attention_config(),
            bias=self.attention_bias,
            theta=self.window_rope_theta if is_local else self.rope_theta,
            window=self.window + 1 if is_local else None,
        )
        mlp = MLPConfig(self.ffn_hidden_size, self.activation, self.mlp_bias)
        return BlockConfig(self.norm_config(), attention, mlp, first_norm=number > 0)

    def computes_like(self, other: "ModernBertConfig") -> bool:
        """Whether two configs describe the same model, also if they spell the types of blocks differently."""
        listed = {"attention_types": (), "window": 0, "window_rope_theta": 0.0, "rope_theta": 0.0}
        ours, theirs = (one.model_copy(update=listed) for one in (self, other))
        return bool(ours == theirs) and self.block_configs() == other.block_configs()
