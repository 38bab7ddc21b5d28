"""Learning from pairs of answers without a reward model: DPO (arXiv 2305.18290) and losses of the same family."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from mplug import hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run

Loss = Literal["sigmoid", "hinge", "ipo", "robust", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust")


class DirectPreferences:
    """Raises the probability of chosen answers over that of rejected ones."""

    class Config(BaseModel):
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
            0.0, description="factor on the mean cross-entropy of a chosen answer, which is added to the loss of its pair"
        )
        reference: Literal["first", "data"] = Field(
            "first",
            description="first: the weights with which the run began; data: log-probabilities that the data plugin reads",
        )

        @model_validator(mode="after")
        def _fields_fit_the_loss(self) -> Self:
            if self.label_smoothing and self.loss not in SMOOTHED:
                raise ValueError(f"label_smoothing is of the losses {' and '.join(SMOOTHED)}, not of '{self.loss}'")
            if self.reference == "data" and self.loss in WITHOUT_REFERENCE:
                raise ValueError(f"reference=data has no effect: the loss '{self.loss}' has no reference; remove it")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def recalls(self) -> bool:
        """Whether each step needs a forward pass with the first weights."""
        return self.config.reference == "first" and self.config.loss not in WITHOUT_REFERENCE

    @hookimpl
    def captures(self) -> bool | str:
        """CUDA graphs replay a step without a pass with other weights."""
        return "runs a forward pass with the first weights before each step" if self.recalls else True

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute the loss of pairs."""
        from mplug_dpo.pairs import PairLoss
        from mplug_nn import set_objective

        set_objective(run, model, PairLoss(self.config, self.recalls), "objectives/dpo")
