"""The first stage of a model: a module and its plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mplug_nn.description import weights_per_token
from torch import nn

from mplug.layout.plan import Plan
from mplug.precision import Recipe

if TYPE_CHECKING:
    from mplug.model.adapters import Adapters, Merge


@dataclass
class Built:
    """A module on the meta device, and its plan, as `build_model` returns them and `adapt_model` changes them.

    `recipe` is that of the run's precision; products of the modules that `base_modules` match ignore it. `attached` are
    the modules that plugins have added, `merges` says how an export multiplies them into the model's parameters, and
    `adapters` is their published form.
    """

    module: nn.Module
    plan: Plan
    recipe: Recipe | None = None
    base_modules: tuple[str, ...] = ()
    attached: dict[str, nn.Module] = field(default_factory=dict)
    merges: "dict[str, Merge]" = field(default_factory=dict)
    adapters: "Adapters | None" = None

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Add modules to the model, by their names in it ('blocks.0.attn.qkv.adapter'), and to the plan.

        Call it in `adapt_model`. Each module describes its parameters by a method `plan_entries(inits)`, as the blocks
        of `mplug_nn` do. The attribute must be absent or None: `Linear.adapter`, `Experts.up_adapter`. Published
        checkpoints of the model do not have the parameters. ValueError for an attribute that is taken, and for a linear
        that is not `adaptable`.
        """
        from mplug.model.attaching import with_attached

        self.plan = with_attached(self.plan, self.module, modules)
        self.attached |= modules

    def freeze(self, names: Iterable[str]) -> None:
        """State in the plan that parameters are not trained, by their names. Call it in `adapt_model`."""
        from mplug.model.attaching import with_frozen

        self.plan = with_frozen(self.plan, names, list(self.parameters()))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, in the order of the modules; a tied one has the first of its names."""
        first = {name: names[0] for names in self.plan.tied for name in names}
        return {first.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    def unit_weight(self, name: str) -> int:
        """Number of weight elements that a unit multiplies with a token: those of linear layers and chosen experts."""
        return weights_per_token(self.module.get_submodule(name))
