"""Evaluations of a run. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_validation.averages import evaluated_in_place as evaluated_in_place
    from mplug_validation.evaluation import CountedTargets as CountedTargets
    from mplug_validation.evaluation import UntilStopped as UntilStopped
    from mplug_validation.evaluation import Validation as Validation
    from mplug_validation.evaluation import evaluate as evaluate
    from mplug_validation.figures import Figures as Figures
    from mplug_validation.other_weights import in_place as in_place

publish(__name__)
