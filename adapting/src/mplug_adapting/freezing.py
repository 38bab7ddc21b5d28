"""Add the parameters that the config freezes (`model.frozen`) to the plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.errors import UsageError
from mplug_adapting.patterns import refuse_unmatched

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.model.built import Built

FIELD = "model.frozen"


def freeze(model: "Built", config: "RunConfig") -> None:
    """Add the config's frozen patterns to the model's plan.

    Raises UsageError if a pattern matches nothing, or if no trained parameter remains.
    """
    source = source_of(config.settings, tuple(FIELD.split(".")))
    refuse_unmatched(model, config.frozen, f"{FIELD} ({source})")
    model.plan = replace(model.plan, frozen=(*model.plan.frozen, *config.frozen))
    if not any(described.trainable for described in model.plan.match(model.parameters()).values()):
        by = f"{FIELD} ({source}) freezes" if config.frozen else "the plan of the model freezes"
        raise UsageError(f"{by} every parameter of the model, so the run would train nothing; freeze fewer parameters")
