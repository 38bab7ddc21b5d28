"""Dropout of the inputs of adapters. Its masks are functions of (seed, step, sample, position, feature, adapter)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mplug import UNIT, Model, Offer, Run, Site, Unit, UsageError, Wrap
from mplug_lora.modules import LowRank

LAYER = 500
"""Inside of recomputation, which then runs the wrap again; outside of nothing else that wraps units."""


def wraps(run: Run, model: Model) -> list[Offer | Wrap]:
    """A wrap for every unit of this rank with adapters.

    Raises UsageError if a unit does not receive keys and positions, by which masks are drawn, or if the layout
    divides the inputs of an adapter: a mask numbers the features of the whole input.
    """
    found: list[Offer | Wrap] = []
    for unit in model.own_units:
        own = {
            name: module
            for name, module in model.attached.items()
            if name.startswith(f"{unit.name}.") and isinstance(module, LowRank)
        }
        for name in own:
            _refuse_divided(model, name)
        if own:
            places = _place(unit, "keys"), _place(unit, "positions")
            wrap = partial(_passing, tuple(own.values()), places)
            found.append(Wrap(UNIT, wrap, LAYER, supports=partial(_is, unit.name), note="keys of dropout"))
    return found


def _place(unit: Unit, entry: str) -> int:
    """The place of an entry among the arguments of a unit's call."""
    if entry not in unit.inputs:
        raise UsageError(
            f"adapters.lora.dropout: unit '{unit.name}' has adapters and does not receive '{entry}', and dropout masks "
            f"are drawn by the keys and positions of samples; set adapters.lora.dropout=0, leave the unit's layers out "
            f"of adapters.lora.targets, or let the model's plan pass '{entry}' to the unit"
        )
    return unit.inputs.index(entry)


def _is(name: str, site: Site, run: Run) -> bool:
    return site.name == name


def _refuse_divided(model: Model, name: str) -> None:
    """Raise UsageError if a mesh axis divides the inputs of an adapter."""
    placement = model.placements[f"{name}.a.weight"]
    axes = [cut.axis for cut in placement.cuts[1] if cut.axis is not None and cut.each < cut.segment.count]
    if axes:
        raise UsageError(
            f"adapters.lora.dropout: {axes[0]} divides the inputs of '{name.removesuffix('.adapter')}', and a dropout "
            f"mask is made for whole inputs; set adapters.lora.dropout=0, use a layout without {axes[0]}, or leave the "
            f"layer out of adapters.lora.targets"
        )


def _passing(adapters: tuple[LowRank, ...], places: tuple[int, int], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a unit's call so that its adapters have the keys and positions of the micro batch."""
    keys, positions = places

    def call(*arguments: Any, **named: Any) -> Any:
        for adapter in adapters:
            adapter.drawn = (arguments[keys], arguments[positions])
        return inner(*arguments, **named)

    return call
