"""The passes of a step if a part of the model is frozen: forward runs everything, backward only what training needs.

Backward computes the gradient of a product's input if something before the product is trained, and the gradient of its
weight if the weight is trained. Units follow each other in the plan's order, and the modules of a unit in the order in
which they are registered. Products outside of the layers of `mplug_nn` count as if they were trained.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mplug_nn.attention import Attention, DotProductAttention
from mplug_nn.linear import Linear
from mplug_nn.moe import MixtureOfExperts
from torch import nn

from mplug.layout.gradient_flow import carrying
from mplug.layout.plan import Flops
from mplug.model.passes import Passes

if TYPE_CHECKING:
    from mplug.model.model import Model


class _Product(NamedTuple):
    """A product of every token with `elements` elements of a weight, and which of its gradients are computed."""

    name: str
    elements: int
    dgrad: bool
    wgrad: bool


class _Core(NamedTuple):
    """An attention core: `width` is its share of all attention, `backward` says whether it has a backward pass."""

    name: str
    width: int
    backward: bool


def passes_of(model: "Model") -> Passes:
    """The passes of a whole model. Call it after `Model.place` and before `Model.keep_stage`."""
    found = list(_walk(model))
    products = [one for one in found if isinstance(one, _Product)]
    cores = [one for one in found if isinstance(one, _Core)]
    no_dgrad, no_wgrad = (
        [product for product in products if not product.dgrad],
        [product for product in products if not product.wgrad],
    )
    no_backward = [core for core in cores if not core.backward]
    per_token, pairs = model.plan.flops.per_token, model.plan.flops.per_squared_length
    third, backward = per_token // 3, pairs - pairs // 3
    if no_backward:
        backward -= backward * sum(core.width for core in no_backward) // sum(core.width for core in cores)
    return Passes(
        Flops(third, pairs // 3),
        Flops(third - 2 * sum(one.elements for one in no_dgrad), backward),
        Flops(per_token - 2 * third - 2 * sum(one.elements for one in no_wgrad), 0),
        *(frozenset(one.name for one in found) for found in (no_dgrad, no_wgrad, no_backward)),
    )


def _walk(model: "Model") -> Iterator[_Product | _Core]:
    """The products and attention cores of all units, in order."""
    trained = model.trained_units()
    all_trained = all(placement.parameter.trainable for placement in model.placements.values())
    for unit, carried in zip(model.plan.units, carrying(model.plan.units, trained), strict=False):
        walk = _Walk(model, unit.name in trained)
        # A plan counts all three passes of every product, including the first. So without frozen parameters, the result
        # is exactly what the plan states.
        walk.visit(model.module.get_submodule(unit.name), unit.name, all_trained or not carried.isdisjoint(unit.inputs))
        yield from walk.found


class _Walk:
    """Walks through the modules of a unit.

    The argument `learns` of a method says whether the input carries a gradient; the method returns whether the output
    does.
    """

    def __init__(self, model: "Model", unit_is_trained: bool) -> None:
        self.model, self.unit_is_trained = model, unit_is_trained
        self.found: list[_Product | _Core] = []

    def visit(self, part: nn.Module, name: str, learns: bool) -> bool:
        """Visit a module and its submodules."""
        if isinstance(part, Linear):
            self._product(f"{name}.weight", part.weight.numel(), learns, name)
            if part.adapter is not None:
                self.visit(part.adapter, f"{name}.adapter", learns)
            return learns or self._trains(part, name)
        if isinstance(part, MixtureOfExperts):
            return self._experts(part, name, learns)
        if isinstance(part, Attention):
            learns = self.visit(part.qkv, f"{name}.qkv", learns) or self._trains_own(part, name)
            self.found.append(_Core(name, part.num_heads * part.head_dim, learns))
            return self.visit(part.out, f"{name}.out", learns)
        if isinstance(part, DotProductAttention):  # its projections are elsewhere in the unit
            self.found.append(_Core(name, part.num_heads * part.head_dim, learns or self.unit_is_trained))
        learns = learns or self._trains_own(part, name)
        for attribute, child in part.named_children():
            learns = self.visit(child, f"{name}.{attribute}", learns)
        return learns

    def _experts(self, part: MixtureOfExperts, name: str, learns: bool) -> bool:
        """Visit a mixture of experts; router, experts and shared experts take the same input."""
        experts, choice = part.experts, part.router.choice
        used = [one.numel() * choice.top_k // choice.num_experts for one in (experts.up, experts.down)]
        self._product(f"{name}.router.weight", part.router.weight.numel(), learns)
        self._product(f"{name}.experts.up", used[0], learns)
        self._product(f"{name}.experts.down", used[1], learns or self._trained(f"{name}.experts.up"))
        for attribute in ("shared", "shared_gate"):
            child = getattr(part, attribute)
            if child is not None:
                self.visit(child, f"{name}.{attribute}", learns)
        return learns or self._trains(part, name)

    def _product(self, weight: str, elements: int, learns: bool, name: str = "") -> None:
        self.found.append(_Product(name or weight, elements, learns, self._trained(weight)))

    def _trained(self, name: str) -> bool:
        return self.model.placement_of(name).parameter.trainable

    def _trains(self, part: nn.Module, name: str) -> bool:
        return any(self._trained(f"{name}.{own}") for own, _ in part.named_parameters())

    def _trains_own(self, part: nn.Module, name: str) -> bool:
        return any(self._trained(f"{name}.{own}") for own, _ in part.named_parameters(recurse=False))
