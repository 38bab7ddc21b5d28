"""Add the parameters that the config freezes (`model.frozen`) to the plan."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.errors import UsageError, suggest
from mplug.layout.names import within

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.model.built import Built

FIELD = "model.frozen"


def freeze(model: "Built", config: "RunConfig") -> None:
    """Add the config's frozen patterns to the model's plan.

    Raises UsageError if a pattern matches nothing, or if no trained parameter remains.
    """
    source = source_of(config.settings, tuple(FIELD.split(".")))
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    for pattern in config.frozen:
        if not any(within(pattern).fullmatch(name) for name in names):
            raise UsageError(
                f"{FIELD} ({source}): '{pattern}' matches no parameter and no module of the model"
                f"{suggest(pattern, _nameable(names))}; 'mplug explain' lists the parameters"
            )
    model.plan = replace(model.plan, frozen=(*model.plan.frozen, *config.frozen))
    if not any(described.trainable for described in model.plan.match(model.parameters()).values()):
        by = f"{FIELD} ({source}) freezes" if config.frozen else "the plan of the model freezes"
        raise UsageError(f"{by} every parameter of the model, so the run would train nothing; freeze fewer parameters")


def freeze_all(model: "Built") -> None:
    """Freeze every parameter, for a run that only runs forward: no strategy then keeps anything for gradients."""
    model.plan = replace(model.plan, frozen=("*",))


def _nameable(names: Iterable[str]) -> list[str]:
    """Every name that a pattern can match: those of parameters and of the modules that contain them."""
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)))
