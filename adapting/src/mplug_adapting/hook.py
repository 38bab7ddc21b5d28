"""Calls the hook `adapt_model`, and refuses what would break the model that the other plugins see."""

from typing import TYPE_CHECKING

from mplug.errors import UsageError, counted

if TYPE_CHECKING:
    from mplug.layout.plan import Parameter
    from mplug.model.built import Built
    from mplug.run.run import Run


def adapt(run: "Run", model: "Built") -> None:
    """Let the plugins of the run adapt the model, from the innermost layer outwards.

    Raises UsageError, with the plugin's label, if a plugin changes a parameter of the model that it got.
    """
    publisher = ""
    for label, adapt_model in run.hooks.layered("adapt_model"):
        before, published = _described(model), model.adapters
        adapt_model(run=run, model=model)
        _refuse_changes(label, before, _described(model))
        if published is not None and model.adapters is not published:
            raise UsageError(
                f"{publisher} and {label} both state the published form of the run's adapters, and an export would "
                f"lose those of {publisher}; use one of them"
            )
        publisher = publisher or (label if model.adapters is not None else "")


def _described(model: "Built") -> "dict[str, tuple[tuple[int, ...], Parameter]]":
    """The shape and the plan's entry of every parameter."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.parameters().items()}
    return {name: (shapes[name], entry) for name, entry in model.plan.match(shapes).items()}


def _refuse_changes(
    label: str,
    before: "dict[str, tuple[tuple[int, ...], Parameter]]",
    after: "dict[str, tuple[tuple[int, ...], Parameter]]",
) -> None:
    lost = [name for name in before if name not in after]
    if lost:
        rest = f" and {counted(len(lost) - 1, 'other')}" if len(lost) > 1 else ""
        raise UsageError(
            f"{label} removes or renames the parameter '{lost[0]}'{rest} in adapt_model, so no checkpoint of the model "
            f"would fit; a plugin must keep the names of the model that it adapts"
        )
    for name, (shape, entry) in before.items():
        now, adapted = after[name]
        if now != shape or adapted.dims != entry.dims:
            raise UsageError(
                f"{label} changes the shape or the dimensions of '{name}' from {shape} to {now} in adapt_model; a "
                f"plugin must keep the parameters of the model that it adapts, and add others"
            )
        if adapted.trainable and not entry.trainable:
            raise UsageError(
                f"{label} trains '{name}' in adapt_model, which the plan of the model has frozen; a plugin may only "
                f"freeze parameters of the model that it adapts"
            )
