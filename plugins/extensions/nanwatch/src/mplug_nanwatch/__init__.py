"""The origin of a loss or gradient that is not finite, found by running the passes of the step again with checks."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from mplug import Model, RankBatch, Run, RunConfig
    from mplug_nanwatch.checks import Checks


class NanWatch:
    """Explains a step whose loss or gradient norm is not finite: unit, tensor, rank, samples and likely cause.

    The passes of the step run again, with a check after each unit, forward and backward. If the rerun is finite, a
    transient fault of a machine is the cause. Otherwise it is a weight, the data, or the program.
    """

    class Config(BaseModel):
        """What is kept of each step."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        gradients: bool = Field(
            False,
            description="keep the sum of each weight gradient of a step before ranks sum them, to name the rank of a "
            "transient fault in one; reads all gradients once more in each step",
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.checks: Checks | None = None

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse runs whose steps cannot be repeated."""
        if config.trainer.nonfinite != "stop":
            raise UsageError(
                f"extensions.nanwatch repeats a step with the weights that it had, and trainer.nonfinite="
                f"{config.trainer.nonfinite} lets the next step change them first; set trainer.nonfinite=stop, or "
                f"extensions.nanwatch=false"
            )
        if config.trainer.graphs:
            raise UsageError(
                "extensions.nanwatch checks the results between units, and trainer.graphs replays a step as a whole; "
                "set trainer.graphs=false, or extensions.nanwatch=false"
            )

    @hookimpl
    def training_built(self, run: "Run", model: "Model") -> None:
        """Put checks around the units of this rank."""
        from mplug_nanwatch.checks import Checks

        self.checks = Checks(run, model, self.config.gradients)

    @hookimpl
    def training_released(self) -> None:
        """Drop the checks, which keep the model."""
        self.checks = None

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Forget the checks of steps that have been reported."""
        if self.checks is not None:
            self.checks.begin(run.step)

    @hookimpl
    def explain_nonfinite(self, run: "Run", step: int, batches: "list[RankBatch]", rerun: "Callable[[], None]") -> str:
        """The origin, in a sentence, the same on all ranks. Collective."""
        from mplug_nanwatch.finding import sentence

        assert self.checks is not None, "the host builds a run before its first step"
        found = self.checks.diagnose(step, batches, rerun)
        return sentence(run.gathered(found))
