"""The config of the objective. Imports no torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from mplug import listed

Loss = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "simpo", "orpo",
]  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "exo_pair")


class DPOConfig(BaseModel):
    """The loss of a pair, and where the reference comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Loss = Field(
        "sigmoid",
        description="sigmoid: DPO (2305.18290); sigmoid_norm: DPO of means over tokens; hinge (2305.10425); ipo "
        "(2310.12036); robust: DPO for flipped labels (2403.00409); exo_pair (2402.00856); nca_pair (2402.05369); "
        "bco_pair (2404.04656, without its shift); sppo_hard (2405.00675); apo_zero and apo_down (2408.06266); simpo "
        "(2405.14734) and orpo (2403.07691): without a reference",
    )
    beta: PositiveFloat = Field(0.1, description="strength: how far a pair may move the model from the reference")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs whose labels are flipped; of sigmoid (conservative DPO), robust and "
        "exo_pair, which needs it",
    )
    gamma: NonNegativeFloat = Field(0.5, description="of simpo: margin by which chosen answers must be better")
    sft_weight: NonNegativeFloat = Field(
        0.0,
        description="factor on the mean cross-entropy of a chosen answer, added to the loss of its pair",
    )
    reference: Literal["first", "data"] = Field(
        "first",
        description="first: the weights with which the run began; data: log-probabilities that the data supply",
    )

    @model_validator(mode="after")
    def _fields_fit_the_loss(self) -> Self:
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(f"label_smoothing is of the losses {listed(SMOOTHED)}, not of '{self.loss}'")
        if self.loss == "exo_pair" and not self.label_smoothing:
            raise ValueError("exo_pair needs label_smoothing above 0, as its target has no logarithm at 0; set 0.001")
        if self.gamma != type(self).model_fields["gamma"].default and self.loss != "simpo":
            raise ValueError(f"gamma has no effect: it is of the loss simpo, not of '{self.loss}'; remove it")
        if self.reference == "data" and self.loss in WITHOUT_REFERENCE:
            raise ValueError(f"reference=data has no effect: the loss '{self.loss}' has no reference; remove it")
        return self

    @property
    def recalls(self) -> bool:
        """Whether each step needs a forward pass with the first weights."""
        return self.reference == "first" and self.loss not in WITHOUT_REFERENCE
