"""DeepSpeed's engine as a data-parallel strategy: ZeRO stages 1, 2 and 3 (arXiv 1910.02054), and offload."""

from typing import TYPE_CHECKING

from mplug import Axis, Sharding, Variance, contiguous, hookimpl
from mplug_deepspeed.config import DeepSpeedConfig
from mplug_deepspeed.fit import AXIS, refuse_rivals
from mplug_deepspeed.settings import Settings

if TYPE_CHECKING:
    from mplug import DefaultStepper, Model, Run, RunConfig, Stepper
    from mplug_deepspeed.engine import Running


class DeepSpeed:
    """DeepSpeed's engine computes gradients and updates weights; models, data and checkpoints are those of mplug."""

    layer = -100
    """Runs before strategies that sum gradients by listening to sinks, because there are none."""

    Config = DeepSpeedConfig

    captures = "reads values of the device on the CPU in every step"
    """The engine reads the norm on the CPU in every step."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config
        self._running: Running | None = None

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse the strategies with which the engine cannot work, and a file that is no config of DeepSpeed."""
        refuse_rivals(config)
        Settings.read(self.config)

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that splits the batch; its ranks are nearer than replicas, which may be whole nodes."""
        return [Axis(AXIS, config.parallel.degrees[AXIS], entries={"batch": contiguous}, distance=15)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """The rounding of gradients that are not kept and summed in fp32: that of DeepSpeed's defaults below fp32."""
        rounding = Settings.read(self.config).rounding(config.trainer.precision)
        if rounding is None:
            return None
        reason, tolerance = rounding
        return Variance(reason, tolerance, sums=(AXIS,) if config.parallel.degrees[AXIS] > 1 else ())

    @hookimpl
    def shard_states(self, run: "Run", model: "Model") -> Sharding:
        """The partitions of DeepSpeed, as data; refuses what its engine cannot do, and contradictions with the file."""
        from mplug_deepspeed.fit import sharding_of

        return sharding_of(run, model, Settings.read(self.config))

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Build DeepSpeed's engine around this rank's units, and supply pieces in the memory of its partitions.

        A run that does not train has no engine: every rank has the whole weights.
        """
        if not run.trains:
            return
        from mplug_deepspeed.engine import start

        self._running = start(run, model, Settings.read(self.config))

    @hookimpl
    def build_stepper(self, run: "Run", model: "Model", default: "DefaultStepper") -> "Stepper | None":
        """The stepper that runs the engine; None without one."""
        if not run.trains:
            return None
        from mplug_deepspeed.stepper import EngineStepper

        assert self._running is not None
        return EngineStepper(run, model, default, self._running)

    @hookimpl
    def run_finished(self) -> None:
        """Free what the engine keeps outside of the model."""
        if self._running is not None:
            self._running.close()
