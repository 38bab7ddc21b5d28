"""The published form of a model, by the external names of its plan."""

from mplug.errors import UsageError, listed
from mplug.model.model import Model
from mplug_pretrained.expansion import Conversion, conversion_of


def conversion(model: Model) -> Conversion:
    """The published form of a whole model. UsageError if it has none."""
    if model.plan.external is None:
        raise UsageError("this model has no published form: its plan has no external names")
    states = {name: one for name, one in model.buffer_placements.items() if not one.parameter.over}
    try:
        return conversion_of(model.plan.external, model.placements | states, model.plan.tied)
    except ValueError as error:
        raise UsageError(f"this model has no published form: {error}") from None


def refuse_lossy(made: Conversion, parameters: set[str]) -> None:
    """Raise UsageError if an export would drop a parameter. States that public checkpoints do not have are dropped."""
    if lost := sorted(made.absent & parameters):
        raise UsageError(
            f"the published form of this model has no place for {listed(lost[:3])}"
            f"{f' and {len(lost) - 3} others' if len(lost) > 3 else ''}, so an export would lose it; "
            "only the checkpoints of the run hold the whole model"
        )
