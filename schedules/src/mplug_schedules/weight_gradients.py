"""Backward passes in two halves: a pass computes the gradients of activations, and those of weights follow later.

The operands of the products of a pass leave it as gradients of taps (`mplug_products.delayed`). Products declare the
shapes of their operands for an input (`WeightProduct.operands`); a forward pass without memory, once for each shape of
micro batches, finds the inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mplug.gradients.sinks import GradientSink
from mplug.layout.plan import Unit
from mplug.model.model import Model
from mplug.model.slots.offers import RECOMPUTING
from mplug.model.units import run_units
from mplug_products import weights_at_rest
from mplug_products.delayed import Later, Operands, Taps, without_memory
from mplug_products.weight_product import ProductModule


class Site(NamedTuple):
    """A weight of a module whose gradient can be computed later; `attribute` is that of its `Later`."""

    module: ProductModule
    weight: str
    attribute: str
    sink: GradientSink


class Postponed:
    """The weight gradients of one pass that are still to be computed."""

    def __init__(self, taps: list[tuple[Site, list[Taps]]]) -> None:
        self._taps = taps

    def backward(self) -> AbstractContextManager[None]:
        """The context of the pass's backward: what it recomputes must take the path of the forward pass.

        A module may compute in another way, with other saved tensors, if the gradient of its weight comes later
        (`Linear.is_bare`).
        """
        return _later([(site, _joined(taps)) for site, taps in self._taps])

    @torch.no_grad()
    def compute(self) -> None:
        """Compute them, from the last product to the first, and free their operands."""
        while self._taps:
            site, taps = self._taps.pop()
            for part in reversed(taps):
                if (operands := part.take()) is not None:
                    site.module.compute_later(site.weight, operands)
            site.sink.settle()


class WeightGradients:
    """Runs passes of a model, or of one chunk of it, that leave the weight gradients of its products for later.

    All other parameters (norms, biases, embeddings, and weights that a strategy gathers for each pass) get their
    gradients in the pass itself. So do products whose number of rows depends on values (rows that a module receives
    from other ranks), because a tap has a fixed shape, and products of modules that a unit calls more than once,
    because a tap carries the operands of one call. A module may divide its taps among the parts of one call
    (`mplug_products.delayed.part_of`).
    """

    def __init__(self, model: Model, chunk: int | None = None) -> None:
        self.model = model
        self.units = model.own_units if chunk is None else model.units_of(chunk)
        self.sites = [
            Site(*one[:3], model.sinks[one.parameter])
            for unit in self.units
            for one in weights_at_rest(model, unit.name, "DELAYED")
            if one.parameter in model.sinks
        ]
        self._operands: dict[tuple[Any, ...], list[list[Operands]]] = {}

    @contextmanager
    def postponing(self, entries: Mapping[str, Tensor]) -> Iterator[Postponed]:
        """Within this context, `model.run(entries)`, of the chunk, is a pass whose weight gradients are postponed.

        Run the pass's backward within `backward` of the yielded object. After it, `compute` computes the gradients.
        """
        shapes = ((name, tuple(entry.shape), entry.dtype) for name, entry in entries.items() if _is_tensor(entry))
        key = (self.model.is_repeating, *shapes)
        if key not in self._operands:
            self._operands[key] = self._of_pass(entries)
        taps = [
            (site, [Taps(like, getattr(site.module, site.weight).device) for like in parts])
            for site, parts in zip(self.sites, self._operands[key], strict=True)
            if parts
        ]
        for site, _ in taps:
            site.sink.postpone()
        with _later([(site, _joined(parts)) for site, parts in taps]):
            yield Postponed(taps)

    def _of_pass(self, entries: Mapping[str, Tensor]) -> list[list[Operands]]:
        """The operands that every site's product declares in a forward pass without memory, on the meta device.

        There is one entry for each part in which the site's module multiplies; none if the pass omits the site or calls
        the module more than once, or if the shape of an operand depends on values.
        """
        found: list[list[tuple[Operands | None, int]]] = [[] for _ in self.sites]

        def declares(number: int) -> Callable[..., None]:
            def declare(operands: Operands, parts: int = 1) -> None:
                varies = any(isinstance(length, torch.SymInt) for one in operands for length in one.shape)
                found[number].append((None if varies else tuple(map(without_memory, operands)), parts))

            return declare

        laters = [(site, Later(declare=declares(number))) for number, site in enumerate(self.sites)]
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        with _later(laters), _plain_units(self.model), fake as mode:
            given = {name: mode.from_tensor(x) if _is_tensor(x) else x for name, x in entries.items()}
            run_units(self.model.module, self.units, given)
        return [_of_one_call(products) for products in found]


def _of_one_call(products: list[tuple[Operands | None, int]]) -> list[Operands]:
    """What the products of a site declare, each with the number of parts; nothing unless they are parts of one call."""
    shapes = [operands for operands, parts in products if operands is not None and parts == len(products)]
    return shapes if len(shapes) == len(products) else []


def _joined(taps: list[Taps]) -> Later:
    return Later(tuple(tap for part in taps for tap in part.later.taps))


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, Tensor)


@contextmanager
def _later(laters: list[tuple[Site, Later]]) -> Iterator[None]:
    for site, later in laters:
        setattr(site.module, site.attribute, later)
    try:
        yield
    finally:
        for site, _ in laters:
            setattr(site.module, site.attribute, None)


@contextmanager
def _plain_units(model: Model) -> Iterator[None]:
    """Within this context, units run as their classes define them: not compiled, gathered or recomputed.

    Other wraps around their calls stay: a unit may need what they hand to its modules.
    """
    wraps = {filled.site.name: filled.wraps for filled in model.unit_wraps}
    replaced: list[tuple[Any, Unit, Any]] = []
    for unit in model.own_units:
        part = model.module.get_submodule(unit.name)
        replaced.append((part, unit, vars(part).pop(unit.method, None)))
        for wrap in wraps.get(unit.name, ()):
            if wrap.layer < RECOMPUTING:
                setattr(part, unit.method, wrap.wrap(getattr(part, unit.method)))
    try:
        yield
    finally:
        for part, unit, method in replaced:
            vars(part).pop(unit.method, None)
            if method is not None:
                setattr(part, unit.method, method)
