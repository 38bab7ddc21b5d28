"""The first stage of a model: a module and its plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mplug.layout.plan import Plan
from mplug.layout.work import Work
from mplug.model.plans.work import work_of_units
from mplug.precisions.precision import Recipe
from mplug.registry.provided import needed


@dataclass
class Built:
    """A module on the meta device, and its plan, as `build_model` returns them and `adapt_model` changes them.

    `recipe` is that of the run's precision; products of the modules that `base_modules` match ignore it. `attached` are
    the modules with parameters that plugins have added, `groups` the numbers of the groups of trained parameters that
    have other rates (`optimizer.groups`), `merges` says how an export multiplies them into the model's parameters, and
    `adapters` is their published form (`mplug_pretrained.Merge`, `mplug_pretrained.Adapters`). `beside` are what the
    names of the parameters of a second model begin with, of which an export writes nothing.
    """

    module: nn.Module
    plan: Plan
    recipe: Recipe | None = None
    base_modules: tuple[str, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    attached: dict[str, nn.Module] = field(default_factory=dict)
    merges: dict[str, Any] = field(default_factory=dict)
    adapters: Any = None
    beside: tuple[str, ...] = ()

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Add modules to the model, by their names in it ('blocks.0.attn.qkv.adapter'), and to the plan.

        Call it in `adapt_model`. Each module describes its parameters: by a method `plan_entries(inits)`, or
        where it creates them (`mplug.parameter`). The attribute must be absent or None, and the code of the module that
        has it calls what is there. Published checkpoints of the model do not have the parameters. ValueError for an
        attribute that is taken, and for a module that states `adaptable=False`.
        """
        found = needed("adaptations", "modules that plugins add to a model", "mplug-adapting")
        self.plan = found.with_attached(self.plan, self.module, modules)
        self.attached |= {name: module for name, module in modules.items() if any(True for _ in module.parameters())}

    def freeze(self, names: Iterable[str]) -> None:
        """State in the plan that parameters are not trained, by their names. Call it in `adapt_model`."""
        found = needed("adaptations", "parameters that plugins freeze", "mplug-adapting")
        self.plan = found.with_frozen(self.plan, names, list(self.parameters()))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, in the order of the modules; a tied one has the first of its names."""
        first = {name: names[0] for names in self.plan.tied for name in names}
        return {first.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    def unit_weight(self, name: str) -> int:
        """Number of weight elements that a unit multiplies with a token."""
        return sum(work.flops.per_token // 6 for work in self.work if work.is_weight and work.unit == name)

    @property
    def work(self) -> tuple[Work, ...]:
        """What the plan's FLOPs belong to; before the host has added it to the plan, from the whole module."""
        return work_of_units(self.module, self.plan.units) if self.plan.work is None else self.plan.work
