"""The config of the objective. Imports no torch."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat


class RewardConfig(BaseModel):
    """The loss of a pair, and the head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    center_coefficient: NonNegativeFloat = Field(
        0.0, description="factor on the squared sum of both rewards of a pair, added to its loss: rewards near zero"
    )
    init_std: PositiveFloat = Field(0.02, description="standard deviation of the initial weights of the head")
