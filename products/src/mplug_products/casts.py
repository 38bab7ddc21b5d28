"""Copies of weights in other formats (`WeightProduct.cast`), made once for each version of the weights."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mplug.model.model import Model
from mplug_products.weights import ProductWeight, weights_at_rest


def keep_casts(model: Model) -> None:
    """Let every unit of this rank make the copies that its products read, before its first call with new weights.

    The copies are made outside of the compiled code, which reads them as it reads weights. A weight that a strategy
    gathers for each pass has no copy at rest: its product casts it in both passes.
    """
    for unit in model.own_units:
        if kept := _kept(model, unit.name):
            part = model.module.get_submodule(unit.name)
            setattr(part, unit.method, _with_casts(getattr(part, unit.method), model, kept))


def _with_casts(inner: Callable[..., Any], model: Model, kept: list[ProductWeight]) -> Callable[..., Any]:
    version = -1

    @wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal version
        if version != model.weights_version:
            version = model.weights_version
            _cast(kept)
        return inner(*arguments, **named)

    return call


@torch.no_grad()
def _cast(kept: list[ProductWeight]) -> None:
    for module, weight, copies, _ in kept:
        setattr(module, copies, ())  # frees the old copies first
        setattr(module, copies, module.cast(weight))


@torch.no_grad()
def copies_of(model: Model) -> list[Tensor]:
    """New copies of all weights of this rank, as units keep them: to count bytes, with tensors without memory."""
    kept = dict.fromkeys(one for unit in model.own_units for one in _kept(model, unit.name))
    return [copy for module, weight, *_ in kept for copy in module.cast(weight)]


def _kept(model: Model, unit: str) -> list[ProductWeight]:
    """The weights of a unit that have copies at rest."""
    found = weights_at_rest(model, unit, "CASTS")
    return [one for one in found if one.module.product_of(one.weight)[0].makes_copies]
