"""Learning from rewards: GRPO (arXiv 2402.03300), Dr. GRPO, DAPO, GSPO and CISPO, on completions with advantages."""

from typing import TYPE_CHECKING, Any

from mplug import UsageError, hookimpl
from mplug_grpo.config import GRPOConfig

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig

LABEL = "objectives/grpo"


def _steps_of_a_rollout(config: "RunConfig") -> float:
    """The number of steps that train on the completions of a rollout; 1 of data that states none."""
    data: Any = config.data
    prompts, repeats = getattr(data, "prompts_per_rollout", None), getattr(data, "repeats", 1)
    if prompts is None:
        return float(repeats)
    of_step = config.trainer.global_batch_size * data.per_sample
    return float(prompts * data.num_generations * repeats / of_step)


class PolicyOptimization:
    """Raises the probability of completions that are better than others of their prompt."""

    Config = GRPOConfig

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse another temperature than the data's, and ratios of 1 for completions of older weights."""
        sampled = getattr(config.data, "temperature", None)
        if sampled is not None and sampled != self.config.temperature:
            raise UsageError(
                f"objectives.grpo.temperature={self.config.temperature:g} is not data.temperature={sampled:g}, with "
                f"which the completions are sampled; set both to the same number"
            )
        uses = _steps_of_a_rollout(config)
        if self.config.old == "current" and self.config.correction == "none" and uses > 1:
            raise UsageError(
                f"objectives.grpo.old=current takes every completion as one of the present weights, and a rollout "
                f"serves {uses:g} steps (data.prompts_per_rollout, data.repeats); set objectives.grpo.old=sampled, or "
                f"a correction"
            )

    @hookimpl
    def captures(self) -> bool | str:
        """CUDA graphs replay a step without a pass with other weights."""
        return "runs a forward pass with the first weights before each step" if self.config.beta else True

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute the loss of completions."""
        from mplug_grpo.losses import loss_of
        from mplug_nn import set_objective

        objective = loss_of(self.config, run.config.trainer.seq_length)
        set_objective(run, model, objective, LABEL)
        if run.trains and objective.soft_cap is not None and self.config.temperature != 1.0:
            raise UsageError(
                f"{LABEL}: the model caps its logits, and objectives.grpo.temperature divides logits that are not "
                f"capped; set objectives.grpo.temperature=1 and the temperature of the data to 1"
            )
