"""Reward models: a score of an answer, learned from pairs of a chosen and a rejected one (Bradley and Terry, 1952)."""

from typing import TYPE_CHECKING

from mplug import UsageError, hookimpl
from mplug_reward.config import RewardConfig

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig


class RewardModel:
    """Gives chosen answers a higher score than rejected ones."""

    Config, captures = RewardConfig, True
    computes = "a score of an answer"  # in place of the logits of a text
    suggestion = "measure it with: mplug evaluate --name {name}"
    layer = 100  # outside of adapters, which freeze the model that they get: the head is trained

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse data whose answers lack the token at which they are scored."""
        if getattr(config.data, "keep_end", None) is False:
            raise UsageError(
                "objectives.reward scores an answer at its last token, and data.keep_end=false omits this token from "
                "the input; set data.keep_end=true"
            )

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute scores and the loss of pairs."""
        from mplug_nn import replace_end, width_at_end
        from mplug_reward.scores import RewardLoss

        label = "objectives/reward"
        replace_end(run, model, RewardLoss(self.config, width_at_end(model, label), run.entries), label)
