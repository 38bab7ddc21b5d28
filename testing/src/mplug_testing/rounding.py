"""Whether the products of a precision round their operands: each operand of each product, with the other one exact.

The other operand selects: its rows have a single 1. So the product is a copy of the tested operand, and shows whether
it was rounded. I input, O output, N rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mplug.model.slots.fill import sites
from mplug.model.slots.offers import Filled
from mplug_nn import Linear
from mplug_testing.model_checks import Trial

OPERANDS = (
    "x of forward",
    "weight of forward",
    "grad_y of dgrad",
    "weight of dgrad",
    "grad_y of wgrad",
    "x of wgrad",
)
"""The operands of the three products of a linear layer (`mplug_nn.Gemm`)."""
SLOTS = ("Linear.gemm", "Linear.product")
"""The slots whose products the suite can call alone."""


def sites_of_recipe(trial: Trial) -> list[Filled]:
    """One site of every supplier of `SLOTS` that follows the recipe of the run's precision."""
    recipe, found = trial.run.precision.recipe, dict[tuple[str, str], Filled]()
    for filled in trial.model.slots:
        if recipe is not None and recipe.need in filled.site.needs and filled.site.slot in SLOTS and filled.offer:
            found.setdefault((filled.site.slot, filled.supplier), filled)
    return list(found.values())


def exact_operands(trial: Trial, filled: Filled) -> Iterator[str]:
    """The operands (of `OPERANDS`) that the products at a site read without rounding them."""
    linear = next(one.module for one in sites(trial.model.module) if one.name == filled.site.name)
    assert isinstance(linear, Linear)
    for operand in OPERANDS:
        given, found = _copied_by_a_product(trial, linear, operand)
        if torch.equal(given.double(), found.double()):
            yield operand


def _copied_by_a_product(trial: Trial, linear: Linear, operand: str) -> tuple[Tensor, Tensor]:
    """An operand, and the copy that the product makes of it."""
    name, _, product = operand.partition(" of ")
    outputs, inputs = linear.weight.shape
    size, like = min(outputs, inputs), linear.weight.detach()
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu").to(like)
    chosen = torch.eye(size).to(like)
    shapes = ((size, inputs), (outputs, inputs), (size, outputs))
    x, weight, grad_y = (like.new_zeros(shape) for shape in shapes)
    used = {"forward": {"x": x, "weight": weight}, "dgrad": {"grad_y": grad_y, "weight": weight}}
    operands = {**used, "wgrad": {"grad_y": grad_y, "x": x}}[product]
    for one, tensor in operands.items():
        tensor[:size, :size] = drawn if one == name else chosen
    results = _products(trial, linear, x, weight, grad_y)
    made = results[product][:size, :size]
    # forward x wᵀ: row n of x, column n of wᵀ; dgrad g w: row n of g, row n of w; wgrad gᵀ x: column n of g, row n of x
    turned = operand in ("weight of forward", "grad_y of wgrad")
    return drawn, made.t() if turned else made


def _products(trial: Trial, linear: Linear, x: Tensor, weight: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    """The three products of a linear layer, by the functions in its slots."""
    name = next(name for name, one in trial.model.parameters().items() if one is linear.weight)
    with torch.no_grad():
        linear.weight.copy_(weight)
    sinks = trial.model.sinks
    sinks.begin_step()
    sinks.expect_last()
    leaf = x[None].clone().requires_grad_()
    y = linear(leaf)
    (y if isinstance(y, Tensor) else y[0]).backward(grad_y[None])
    assert leaf.grad is not None
    return {"forward": y.detach()[0], "dgrad": leaf.grad[0], "wgrad": sinks[name].buffer.clone()}
