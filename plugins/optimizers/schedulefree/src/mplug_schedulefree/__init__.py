"""Schedule-free AdamW (arXiv 2405.15682): no decay of the learning rate, by an average of the weights."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, UsageError, hookimpl
from mplug_schedulefree.config import ScheduleFreeConfig

if TYPE_CHECKING:
    from mplug import Parameter, Run, RunConfig


class ScheduleFree:
    """AdamW whose gradients are taken between the weights and their average; the average is the model."""

    Config = ScheduleFreeConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {
        "optimizer": {"lr": 5e-5, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
    }
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a decay of the learning rate, whose place the average takes."""
        if config.schedule.name != "constant":
            raise UsageError(
                f"schedule.name={config.schedule.name} lets the learning rate decay, and optimizers/schedulefree "
                f"replaces the decay by an average of the weights; set schedule.name=constant"
            )

    @hookimpl
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """Elements of updates have a size of their own, as Adam's (arXiv 2203.03466, table 8)."""
        return None if parameter.widths is None else 1 / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, run: "Run", pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_schedulefree.averaged import AveragedAdamW

        return AveragedAdamW(pieces, self.config, run.device)
