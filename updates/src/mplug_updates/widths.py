"""The factors on the learning rates of parameters that are wider than in the base model of the plan (μP)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mplug.errors import UsageError
from mplug.layout.plan import Parameter
from mplug_updates.builders import builder, hook_of

if TYPE_CHECKING:
    from mplug.config.host_sections import ParameterGroup
    from mplug.model.model import Model
    from mplug.run.run import Run

HOOK = "rate_of_width"


def width_rates(run: "Run", model: "Model") -> dict[str, float]:
    """The factor on the learning rate of every trained parameter of the whole model; empty without a base model.

    UsageError if an optimizer does not state how its rate depends on widths, or the plan does not know those of a
    parameter.
    """
    trained = {name: one.parameter for name, one in model.placements.items() if one.parameter.trainable}
    if not any(one.widths for one in trained.values()):
        return {}
    hooks = {number: _rate_of(run, group) for number, group in enumerate((None, *run.config.groups), start=-1)}
    return {name: hooks[model.groups.get(name, -1)](name, one) for name, one in trained.items()}


def _rate_of(run: "Run", group: "ParameterGroup | None") -> Callable[[str, Parameter], float]:
    label, answer = builder(run, group), hook_of(run, group, HOOK)

    def rate(name: str, parameter: Parameter) -> float:
        if parameter.widths is None:
            raise UsageError(
                f"the plan of the model has a base model of other widths (μP), and does not say how wide '{name}' is "
                f"beside it; freeze this parameter, or remove the base model (model.mup_base)"
            )
        found = answer(parameter=parameter)
        if not isinstance(found, float):
            raise UsageError(
                f"the plan of the model has a base model of other widths (μP), and {label} does not state how its "
                f"learning rate depends on widths (the hook '{HOOK}'); use another optimizer, or remove the base model "
                f"(model.mup_base)"
            )
        return found

    return rate
