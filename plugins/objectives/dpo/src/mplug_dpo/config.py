"""The config of the objective. Imports no torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

Loss = Literal["sigmoid", "hinge", "ipo", "robust", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust")


class DPOConfig(BaseModel):
    """The loss of a pair, and where the reference comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Loss = Field(
        "sigmoid",
        description="sigmoid: DPO (2305.18290); hinge (2305.10425); ipo (2310.12036); robust: DPO for flipped "
        "labels (2403.00409); simpo (2405.14734) and orpo (2403.07691): without a reference",
    )
    beta: PositiveFloat = Field(0.1, description="strength: how far a pair may move the model from the reference")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs whose labels are flipped; of sigmoid (conservative DPO) and robust",
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
            raise ValueError(f"label_smoothing is of the losses {' and '.join(SMOOTHED)}, not of '{self.loss}'")
        if self.gamma != type(self).model_fields["gamma"].default and self.loss != "simpo":
            raise ValueError(f"gamma has no effect: it is of the loss simpo, not of '{self.loss}'; remove it")
        if self.reference == "data" and self.loss in WITHOUT_REFERENCE:
            raise ValueError(f"reference=data has no effect: the loss '{self.loss}' has no reference; remove it")
        return self

    @property
    def recalls(self) -> bool:
        """Whether each step needs a forward pass with the first weights."""
        return self.reference == "first" and self.loss not in WITHOUT_REFERENCE
