"""The config of a family of decoders whose feed-forward parts are mixtures of experts."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mplug_nn.decoders.config import DecoderConfig
from mplug_nn.decoders.parts import BlockConfig, ExpertsConfig, MLPConfig, PartConfig, ScoreName
from mplug_nn.open_lists import SINKHORN


class SparseDecoderConfig(DecoderConfig):
    """The base of the `Config` of a family with experts: how tokens choose them, and what keeps their load even.

    The first `num_dense_layers` blocks have an MLP. A family with another arrangement overrides `block_config`.
    """

    ffn_hidden_size: PositiveInt = Field(2048, description="width of an MLP: of the dense blocks', of an expert")
    moe_ffn_hidden_size: PositiveInt | None = Field(None, description="width of an expert; null: ffn_hidden_size")
    moe_latent_size: PositiveInt | None = Field(
        None, description="width of the vectors that experts take and return; null: hidden_size, without projections"
    )
    num_dense_layers: NonNegativeInt = Field(0, description="blocks at the beginning with an MLP, not experts")
    num_experts: PositiveInt = Field(8, description="experts of a block")
    num_experts_per_token: PositiveInt = Field(2, description="experts that each token chooses")
    num_shared_experts: NonNegativeInt = Field(0, description="experts that every token uses beside those")
    moe_shared_ffn_hidden_size: PositiveInt | None = Field(
        None, description="width of all shared experts together; null: num_shared_experts times that of an expert"
    )
    shared_expert_gate: bool = Field(False, description="a sigmoid of the token weighs the shared experts")
    moe_router_score: ScoreName = Field("softmax", description="logits to scores, over experts")
    moe_router_num_groups: PositiveInt = Field(1, description="groups that the experts are divided into")
    moe_router_top_groups: PositiveInt = Field(1, description="groups that a token may choose from")
    moe_router_group_best: PositiveInt = Field(2, description="best scores of a group whose sum is the group's score")
    moe_router_bias: bool = Field(False, description="a trained bias of the router's logits")
    moe_router_normalize: bool | None = Field(
        None, description="a token's gates sum to moe_router_scale; null: if it chooses more than one expert"
    )
    moe_router_scale: PositiveFloat = Field(1.0, description="what gates are multiplied by")
    moe_router_jitter: float = Field(0.0, ge=0, lt=1, description="uniform noise on the router's input: 1 +- jitter")
    moe_balance: Literal["none", "micro_batch", "sequence", "global_batch"] = Field(
        "sequence", description="what the balancing loss is taken over; global_batch: by the shares of the last one"
    )
    aux_loss_coefficient: NonNegativeFloat = Field(0.01, description="weight of the balancing loss")
    z_loss_coefficient: NonNegativeFloat = Field(0.0, description="weight of the router's z-loss")
    expert_bias_rate: NonNegativeFloat = Field(
        0.0, description="step of the bias that balances the choice without a loss; 0: it does not change"
    )
    expert_bias: bool | None = Field(
        None, description="a bias of each expert for the choice; null: only if expert_bias_rate is not 0"
    )
    capacity_factor: PositiveFloat | None = Field(
        None, description="room of an expert, as a multiple of its even share of a micro batch; null: none dropped"
    )
    capacity_dropping: Literal["position", "probability"] = Field(
        "probability",
        description="whose choice counts where an expert is full: the first tokens', the highest gates'",
    )

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.moe_router_normalize is None:  # equal models have equal fields, so the rule ends here
            object.__setattr__(self, "moe_router_normalize", self.num_experts_per_token > 1)
        experts, groups, chosen = self.num_experts, self.moe_router_num_groups, self.num_experts_per_token
        if not experts:
            return self
        if experts % groups:
            raise ValueError(f"moe_router_num_groups={groups} does not divide num_experts={experts}")
        if self.moe_router_top_groups > groups:
            raise ValueError(f"moe_router_top_groups={self.moe_router_top_groups} is more than {groups} groups")
        room = experts // groups * self.moe_router_top_groups
        if chosen > room:
            raise ValueError(f"num_experts_per_token={chosen} is more than the {room} experts to choose from")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers} leaves none of {self.num_layers} for experts")
        if self.expert_bias is False and self.expert_bias_rate:
            raise ValueError(f"expert_bias_rate={self.expert_bias_rate} changes a bias, and expert_bias is false")
        if self.moe_router_score in SINKHORN and (self.expert_bias or self.expert_bias_rate):
            raise ValueError(
                f"moe_router_score={self.moe_router_score} balances the choice, and a bias of the choice would have no "
                f"effect in training; set expert_bias_rate=0 and expert_bias=null"
            )
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError("shared_expert_gate weighs shared experts, and num_shared_experts is 0")
        if self.moe_shared_ffn_hidden_size and not self.num_shared_experts:
            raise ValueError("moe_shared_ffn_hidden_size is the width of shared experts, and num_shared_experts is 0")
        return self

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together, which are one MLP."""
        if not self.num_shared_experts:
            return 0
        return self.moe_shared_ffn_hidden_size or self.num_shared_experts * self.expert_width

    def block_config(self, number: int) -> PartConfig:
        """A block: the first `num_dense_layers` have an MLP, the others experts."""
        dense = number < self.num_dense_layers
        feed_forward = MLPConfig(self.ffn_hidden_size) if dense else self.experts_config()
        return BlockConfig(self.norm_config(), self.attention_config(), feed_forward)

    def experts_config(self) -> ExpertsConfig:
        """The mixture of experts of a block, by the fields of this class."""
        return ExpertsConfig(
            ffn_dim=self.expert_width,
            num_experts=self.num_experts,
            top_k=self.num_experts_per_token,
            score=self.moe_router_score,
            num_groups=self.moe_router_num_groups,
            top_groups=self.moe_router_top_groups,
            normalize=bool(self.moe_router_normalize),
            scale=self.moe_router_scale,
            balance=self.moe_balance,
            balance_coefficient=self.aux_loss_coefficient,
            z_coefficient=self.z_loss_coefficient,
            bias_rate=self.expert_bias_rate,
            choice_bias=bool(self.expert_bias or self.expert_bias_rate),
            logit_bias=self.moe_router_bias,
            group_best=self.moe_router_group_best,
            jitter=self.moe_router_jitter,
            capacity_factor=self.capacity_factor,
            dropping=self.capacity_dropping,
            shared_ffn_dim=self.shared_width,
            shared_gate=self.shared_expert_gate,
            latent_dim=self.moe_latent_size,
        )
