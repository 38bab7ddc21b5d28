"""What the host asks about models that change before a run (`mplug.model.plans.adaptations.Adaptations`)."""

from collections.abc import Iterable, Mapping

from torch import nn

from mplug.config.binding import RunConfig
from mplug.layout.plan import Plan
from mplug.model.built import Built
from mplug.run.run import Run
from mplug_adapting.attaching import with_attached, with_frozen
from mplug_adapting.freezing import freeze
from mplug_adapting.hook import adapt


class Adaptations:
    """The class of the entry-point group 'mplug.adaptations'."""

    def adapt(self, run: Run, model: Built) -> None:
        """Let the plugins of a run adapt the model, from the innermost layer outwards."""
        adapt(run, model)

    def freeze(self, model: Built, config: RunConfig) -> None:
        """Add the config's frozen patterns to the model's plan."""
        freeze(model, config)

    def with_attached(self, plan: Plan, model: nn.Module, modules: Mapping[str, nn.Module]) -> Plan:
        """Add modules to a model's module; the plan that has them too."""
        return with_attached(plan, model, modules)

    def with_frozen(self, plan: Plan, names: Iterable[str], known: list[str]) -> Plan:
        """The plan that does not train these of the known parameters."""
        return with_frozen(plan, names, known)
