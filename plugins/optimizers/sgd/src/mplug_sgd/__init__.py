"""Stochastic gradient descent over pieces, with momentum and Nesterov's look-ahead."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mplug import Optimizer, Piece, hookimpl


class SGD:
    """Stochastic gradient descent as in torch.optim.SGD: velocity b <- momentum b + g, then w <- w - lr b."""

    class Config(BaseModel):
        """Learning rate, momentum and decay."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(0.1, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
        weight_decay: float = Field(
            0.0, ge=0, allow_inf_nan=False, description="decay of parameters of two dimensions and more"
        )
        momentum: float = Field(0.9, ge=0, lt=1, description="decay rate of the velocity; 0: none, and no state")
        nesterov: bool = Field(False, description="step by the velocity as it will be after this gradient once more")
        decoupled_weight_decay: bool = Field(
            False,
            description="decay weights directly (arXiv 1711.05101); false: by the gradient of an L2 penalty, so that "
            "decay gathers momentum",
        )

        @model_validator(mode="after")
        def _needs_momentum(self) -> "SGD.Config":
            if self.nesterov and not self.momentum:
                raise ValueError("nesterov looks ahead along the momentum, which is 0; set momentum, or nesterov=false")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_sgd.fused import FusedSGD

        return FusedSGD(pieces, self.config)
