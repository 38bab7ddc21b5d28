"""What the host asks of the package by which plugins and settings change a model before a run."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from mplug.registry.provided import needed

if TYPE_CHECKING:
    from torch import nn

    from mplug.config.binding import RunConfig
    from mplug.layout.plan import Plan
    from mplug.model.built import Built
    from mplug.run.run import Run


class Adaptations(Protocol):
    """The methods of the class in the entry-point group 'mplug.adaptations'. Their errors are UsageErrors."""

    def adapt(self, run: "Run", model: "Built") -> None:
        """Call the hook `adapt_model`, and refuse what would break the model that the other plugins see."""

    def freeze(self, model: "Built", config: "RunConfig") -> None:
        """Add the patterns of `model.frozen` to the plan; refuse one without a match, and a run that trains nothing."""

    def with_attached(self, plan: "Plan", model: "nn.Module", modules: "Mapping[str, nn.Module]") -> "Plan":
        """Add modules to a model's module (`Model.attach`); the plan that has them too."""

    def with_frozen(self, plan: "Plan", names: Iterable[str], known: list[str]) -> "Plan":
        """The plan that does not train these of the `known` parameters (`Model.freeze`)."""


def adaptations(what: str) -> Adaptations:
    """The installed class. UsageError, with `what` needs it, if there is none."""
    found: Adaptations = needed("adaptations", what, "mplug-adapting")
    return found
