"""What some training steps need beside losses and gradients. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_steps.generator_seeds import GeneratorSeeds as GeneratorSeeds
    from mplug_steps.loss_scale import LossScale as LossScale
    from mplug_steps.reduction import Reduction as Reduction
    from mplug_steps.repeating import RepeatingStepper as RepeatingStepper
    from mplug_steps.statistics import Statistics as Statistics
    from mplug_steps.steps import Steps as Steps
    from mplug_steps.token_scale import TokenScale as TokenScale

publish(__name__)
