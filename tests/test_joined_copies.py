"""The copies of several ranks' rows: they join to that of the whole weight, with one scale, for one pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathered_settings import BLOCKS, COPIES, DELAYED, FSDP2, Settings
from gpus import with_nccl
from mplug_fp8 import FP8
from mplug_fp8.suppliers import offers
from mplug_fsdp.copies import Place, Rows, UnitCopies
from mplug_fsdp.gathered import Formats, Gathered
from torch import Tensor, nn

from mplug import Offer
from mplug.model.build import build_model
from mplug_nn import GatheredForm, Linear, Operand, Product
from mplug_ops.lanes import Lane
from mplug_products import GatheredCopies, gathered_copies
from mplug_testing import run_workers
from mplug_testing.gathered_copy_checks import gathered_fault, gathered_forms
from mplug_testing.harness import tiny_run

# The contract, checked by the suite for kernels.


def offered(settings: Settings, keeps_weights: bool = False) -> list[Offer]:
    """The offers of the fp8 products of a recipe."""
    fields = {name.rpartition(".")[2]: value for name, value in settings.items() if name.startswith("precisions.fp8.")}
    return offers(FP8(FP8.Config(**fields)).define_precision().recipe, keeps_weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keeps_weights", [False, True], ids=["cast in every pass", "copies kept"])
@pytest.mark.parametrize("recipe", [{}, DELAYED, BLOCKS], ids=["tensorwise", "delayed", "blockwise"])
def test_fp8_copies_of_the_rows_of_ranks_are_those_of_the_whole(
    recipe: Settings, keeps_weights: bool, device: str
) -> None:
    tried = 0
    for offer in offered(recipe, keeps_weights):
        for slot, form in gathered_forms(offer).items():
            assert isinstance(form, GatheredForm)
            assert gathered_fault(offer, slot, form, torch.bfloat16, device) == "", slot
            tried += 1
    assert tried == (4 if recipe is DELAYED else 2)


class Scaled(Product):
    """x Wᵀ with weights of 8 bits and one scale; `fault` is a planted mistake."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def gathered_form(self) -> GatheredForm:
        along = (True, False, False) if self.fault == "one more" else (True, False)
        return GatheredForm(self._cast, along, None if self.fault == "own scale" else lambda rows, _: largest(rows))

    def _cast(self, rows: Tensor, found: Tensor, buffers: Any) -> tuple[Tensor, ...]:
        scale = 127 / (largest(rows) if self.fault == "own scale" else found)
        numbers = (rows * scale).round().to(torch.int8)
        return (numbers.t().contiguous() if self.fault == "by columns" else numbers), scale

    def _values(self, weight: Operand) -> Tensor:
        if self.fault == "reads the weight" and weight.casts:
            return weight.values
        numbers, scale = weight.casts or self._cast(weight.values, largest(weight.values), {})
        return numbers.to(weight.values.dtype) / scale * (1.5 if self.fault == "other numbers" and weight.casts else 1)

    def forward(self, x: Tensor, weight: Operand, *_: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x @ self._values(weight).t(), (x,)

    def dgrad(self, grad_y: Tensor, weight: Operand, saved: Any, *_: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return grad_y @ self._values(weight), (grad_y, *saved)

    def wgrad(self, operands: tuple[Tensor, Tensor], *_: Any) -> Tensor:
        return operands[0].t() @ operands[1]


def largest(rows: Tensor) -> Tensor:
    return rows.abs().amax().view(1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("", ""),
        ("reads the weight", "the output has other bits than with the whole weight: it reads weight.values"),
        ("other numbers", "the output has other bits than with the whole weight: the copies are not the same"),
        ("own scale", "copy 1 does not travel (along_rows), and ranks have different values of it"),
        ("one more", "along_rows describes 3 copies, and cast returns 2"),
        ("by columns", "copy 0 has (128, 13) from all ranks, and (128, 64) of the whole"),
    ],
)
def test_the_suite_reports_copies_that_do_not_join(fault: str, sentence: str) -> None:
    product = Scaled(fault)
    offer = Offer({"Linear.product": product})
    found = gathered_fault(offer, "Linear.product", product.gathered_form(), torch.float64, "cpu")
    assert sentence in found
    assert bool(found) == bool(sentence)


def test_copies_that_do_not_fit_each_other_end_the_build_with_the_plugins_name() -> None:
    run = tiny_run({**FSDP2, **COPIES})
    model = build_model(run)
    up: Any = model.module.get_submodule("blocks.1.mlp.up")
    up.product = Scaled("by columns")
    with pytest.raises(ValueError, match=r"kernels/fp8: the gathered form of 'blocks\.1\.mlp\.up\.weight' declares"):
        gathered_copies(run, model)


def unit_of(rows: Tensor, product: Product, ranks: int) -> tuple[Linear, Rows]:
    """A layer with the rows [o, I] of one of so many ranks, and the copies that ranks gather."""
    form = product.gathered_form()
    assert isinstance(form, GatheredForm)
    layer = Linear(rows.shape[1], ranks * len(rows), bias=False)
    layer.product, layer.weight = product, nn.Parameter(rows)
    whole = torch.zeros(ranks * len(rows), rows.shape[1], dtype=torch.bfloat16, device=rows.device)
    like = form.cast(whole, form.largest(whole, {}), {})
    copies = GatheredCopies(layer, "Linear.product", "casts", form, "kernels/fp8", like, 0)
    place = Place(layer._parameters, "weight")
    return layer, Rows("weight", layer.weight, tuple(whole.shape), None, [place], copies)


def product_of(recipe: Settings) -> Product:
    found = offered(recipe, True)[0].suppliers["Linear.product"]
    assert isinstance(found, Product)
    return found


def infinite() -> float:
    """Be one of two ranks, of which the second has a weight that is not a number: the largest value that it finds."""
    rows = torch.ones(16, 16)
    if dist.get_rank() == 1:
        rows[3, 3] = torch.nan
    group = dist.group.WORLD
    assert group is not None
    layer, own = unit_of(rows, product_of({}), 2)
    assert own.copies is not None
    unit = UnitCopies([own], [torch.empty_like(own.copies.like[0])], torch.bfloat16, group, torch.device("cpu"))
    unit.cast()
    unit.show()
    return float(layer.casts[1])


def test_a_number_that_is_not_finite_on_one_rank_makes_the_scale_of_all_ranks_nan() -> None:
    assert all(scale != scale for scale in run_workers(2, infinite))


SHAPES = {"a": (2, 3), "b": (4, 2)}
"""The rows of each of two ranks."""


def rows_of(name: str, rank: int) -> Tensor:
    rows, width = SHAPES[name]
    return torch.arange(1, rows * width + 1, dtype=torch.float32).view(rows, width) * (rank + 1 + 10 * (name == "b"))


def cast_in_pairs() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Be one of four ranks in two groups: what is sent of each of two weights, and what is not."""
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    form = GatheredForm(
        lambda rows, largest, _: (rows / largest, largest.clone(), 3 * largest),
        (True, False, False),
        lambda rows, _: rows.amax(dim=0),
    )
    layers, own = list[Linear](), list[Rows]()
    for name, (rows, width) in SHAPES.items():
        layer = Linear(width, 2 * rows, bias=False)
        layer.weight = nn.Parameter(rows_of(name, rank))
        like = form.cast(torch.zeros(2 * rows, width), torch.ones(width), {})
        copies = GatheredCopies(layer, "Linear.product", "casts", form, "kernels/fp8", like, 0)
        layers.append(layer)
        place = Place(layer._parameters, "weight")
        own.append(Rows(name, layer.weight, (2 * rows, width), None, [place], copies))
    whole = [torch.zeros(2 * rows, width) for rows, width in SHAPES.values()]
    unit = UnitCopies(own, whole, torch.float32, group, torch.device("cpu"))
    sent = unit.cast()
    unit.show()
    return {name: (one, *layer.casts[1:]) for name, one, layer in zip(SHAPES, sent, layers, strict=True)}


def test_every_weight_is_cast_with_the_largest_value_of_its_own_rows_on_the_ranks_of_its_group() -> None:
    found = run_workers(4, cast_in_pairs)
    for rank, weights in enumerate(found):
        for name, (sent, largest, thrice) in weights.items():
            expected = torch.maximum(*(rows_of(name, one).amax(dim=0) for one in (rank % 2, rank % 2 + 2)))
            assert torch.equal(sent, (rows_of(name, rank) / expected).flatten())
            assert torch.equal(largest, expected)
            assert torch.equal(thrice, 3 * expected)


def gathered_once(device: str, recipe: Settings) -> None:
    """Be the only rank: a unit's copies before, during and after a pass, for two versions of the weight."""
    if device == "cuda":
        with_nccl()
    product, where, group = product_of(recipe), torch.device(device), dist.group.WORLD
    assert group is not None
    rows = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).to(where)
    layer, own = unit_of(rows, product, 1)
    formats = Formats(torch.bfloat16, torch.float32, torch.float32)
    unit = Gathered([own], group, Lane(where), formats, where)
    for version in (rows, rows * 3):
        own.values.data.copy_(version)
        for _ in range(2):
            assert layer.casts == ()
            unit.gather()
            unit.wait()
            for ours, right in zip(layer.casts, product.cast(version.to(torch.bfloat16), {}), strict=True):
                assert torch.equal(ours.view(torch.uint8), right.view(torch.uint8))
            assert layer.weight.isnan().all(), "a reader of the weight gets no value"
            assert layer.weight.untyped_storage().nbytes() == 2
            held = layer.casts[0]
            unit.free()
            assert held.untyped_storage().nbytes() == 0
            assert layer.weight is own.values
        unit.forget()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [{}, BLOCKS], ids=["tensorwise", "blockwise"])
def test_copies_exist_during_a_pass_and_follow_the_version_of_the_weight(recipe: Settings, device: str) -> None:
    run_workers(1, gathered_once, device, recipe)
