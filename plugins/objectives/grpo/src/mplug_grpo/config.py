"""The config of the objective. Imports no torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
BY_TOKENS = ("dapo", "cispo")
"""Losses whose mean is over the tokens of the global batch; that of the others is over completions."""
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class GRPOConfig(BaseModel):
    """The loss of completions with advantages, and the policies with which it compares the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Loss = Field(
        "dapo",
        description="grpo: mean over completions of means over tokens (2402.03300); dr_grpo: sums over tokens divided "
        "by a constant (2503.20783); dapo: mean over the tokens of the global batch (2503.14476); gspo: grpo with one "
        "ratio for a completion (2507.18071); cispo: ratios as constant, truncated weights (2506.13585)",
    )
    epsilon: PositiveFloat = Field(0.2, lt=1, description="lower clipping: ratios below 1 - epsilon; unused by cispo")
    epsilon_high: PositiveFloat | None = Field(
        None, description="upper clipping: ratios above 1 + epsilon_high; of cispo, the largest weight; null: epsilon"
    )
    delta: float | None = Field(
        None, gt=1, description="largest ratio of completions with negative advantages (dual clip, 1912.09729)"
    )
    beta: NonNegativeFloat = Field(
        0.0, description="factor on the KL divergence from the weights with which the run began; 0: no reference"
    )
    kl: Literal["k2", "k3"] = Field(
        "k3",
        description="estimate of the KL divergence by d = log reference - log model: k3 = exp(d) - d - 1, as in GRPO; "
        "k2 = d^2 / 2, whose gradient is that of the divergence",
    )
    old: Literal["sampled", "current"] = Field(
        "sampled",
        description="what ratios compare the model with: sampled: the log-probabilities with which the data's tokens "
        "were sampled; current: the model itself, if each completion is used in one step only (a ratio is then 1)",
    )
    correction: Correction = Field(
        "none",
        description="of old=current: multiply losses by the model's probabilities over those of the sampler, of tokens "
        "or of sequences; truncate: at most correction_max; mask: 0 above it",
    )
    correction_max: PositiveFloat = Field(3.0, description="bound of the correction")
    temperature: PositiveFloat = Field(
        1.0, description="divides the logits, as the sampler divided them when it sampled the completions"
    )
    length: PositiveInt | None = Field(
        None, description="of dr_grpo: what divides the sum over a completion's tokens; null: trainer.seq_length"
    )

    @model_validator(mode="after")
    def _fields_fit_the_loss(self) -> Self:
        if self.loss == "cispo" and self.epsilon_high is None:
            raise ValueError("cispo truncates ratios at epsilon_high; set it, to 5.0 for example")
        if self.loss == "cispo" and self.delta is not None:
            raise ValueError("delta has no effect: cispo clips no ratio; remove it")
        if self.loss == "cispo" and self.epsilon != type(self).model_fields["epsilon"].default:
            raise ValueError("epsilon has no effect: cispo has no lower bound; remove it, or set epsilon_high")
        if self.length is not None and self.loss != "dr_grpo":
            raise ValueError(f"length has no effect: it is of the loss dr_grpo, not of '{self.loss}'; remove it")
        if self.correction != "none" and self.old != "current":
            raise ValueError(
                f"correction={self.correction} has no effect with old=sampled, whose ratios compare the model with the "
                f"sampler already; remove it, or set old=current"
            )
        if self.loss == "gspo" and self.correction.startswith("token"):
            raise ValueError("gspo has one ratio for a completion; set correction to one of sequences")
        if self.correction == "none" and self.correction_max != type(self).model_fields["correction_max"].default:
            raise ValueError("correction_max has no effect without a correction; remove it, or set correction")
        if self.kl != "k3" and not self.beta:
            raise ValueError("kl has no effect with beta=0; remove it, or set beta")
        return self

    @property
    def high(self) -> float:
        """The upper bound of ratios, or of the weights of cispo."""
        if self.loss == "cispo":
            assert self.epsilon_high is not None
            return self.epsilon_high
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def needs_sampled(self) -> bool:
        """Whether the loss needs the log-probabilities of the sampler."""
        return self.old == "sampled" or self.correction != "none"
