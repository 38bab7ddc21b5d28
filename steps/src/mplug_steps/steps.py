"""What the host asks about steps (`mplug.training.steps.Steps`)."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mplug.contracts.optimizer import Piece
from mplug.contracts.stepper import Stepper
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.products import slot_updates
from mplug.run.run import Run
from mplug_steps.determinism import deterministic
from mplug_steps.generator_seeds import GeneratorSeeds
from mplug_steps.loss_scale import LossScale
from mplug_steps.repeating import repeating
from mplug_steps.rerunning import rerunning
from mplug_steps.token_scale import TokenScale

if TYPE_CHECKING:
    from mplug_steps.reduction import Reduction
    from mplug_steps.statistics import Statistics


class Steps:
    """The class of the entry-point group 'mplug.steps'."""

    def reduction(
        self, run: Run, placements: Mapping[str, Placement], reduced_over: Collection[str], pieces: list[Piece]
    ) -> "Reduction":
        """What sums gradients that strategies have not summed."""
        from mplug_steps.reduction import Reduction  # with mplug_ops, which adds 50 ms to start-up

        return Reduction(run, placements, reduced_over, pieces)

    def deterministic(self) -> AbstractContextManager[None]:
        """In the block, torch gives the same bits for the same computation, or raises if it cannot."""
        return deterministic()

    def seeds(self, run: Run, model: Model, drawing: str) -> GeneratorSeeds:
        """What seeds torch's generators; `drawing` is the label of a plugin that draws from them."""
        return GeneratorSeeds(model.plan, run.mesh, run.rank, run.device, drawing)

    def statistics(self, run: Run, model: Model) -> "Statistics":
        """The statistics of a model. Collective."""
        from mplug_steps.statistics import Statistics  # with mplug_ops, which adds 50 ms to start-up

        return Statistics(run, model.module, model.plan, model.buffer_placements, slot_updates(model))

    def token_scale(self, run: Run, module: nn.Module, loss_scale: Tensor | None) -> TokenScale:
        """The factor of losses inside of blocks that are means over tokens."""
        return TokenScale(run, module, loss_scale)

    def loss_scale(self, run: Run, module: nn.Module) -> LossScale:
        """The dynamic loss scale of a run."""
        return LossScale(run, module)

    def repeating(self, run: Run, model: Model, stepper: Stepper) -> Stepper:
        """The stepper that runs the passes of a step again if a plugin says that they were not exact."""
        return repeating(run, model, stepper)

    def rerunning(self, run: Run, model: Model, stepper: Stepper) -> Stepper:
        """The stepper that can run the passes of the last steps again."""
        return rerunning(run, model, stepper)
