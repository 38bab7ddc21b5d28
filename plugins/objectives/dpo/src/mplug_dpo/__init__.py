"""Learning from pairs of answers without a reward model: DPO (arXiv 2305.18290) and losses of the same family."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_dpo.config import DPOConfig

if TYPE_CHECKING:
    from mplug import Model, Run


class DirectPreferences:
    """Raises the probability of chosen answers over that of rejected ones."""

    Config = DPOConfig

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    @hookimpl
    def captures(self) -> bool | str:
        """CUDA graphs replay a step without a pass with other weights."""
        return "runs a forward pass with the first weights before each step" if self.config.recalls else True

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute the loss of pairs."""
        from mplug_dpo.pairs import PairLoss
        from mplug_nn import set_objective

        set_objective(run, model, PairLoss(self.config), "objectives/dpo")
