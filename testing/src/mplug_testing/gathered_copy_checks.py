"""Checks the copies of weights that ranks gather instead of the weights (`mplug_nn.GatheredForm`)."""

from typing import Any

import torch
from torch import Tensor, nn

from mplug.model.slots.declaration import slot_of
from mplug.model.slots.offers import Offer
from mplug_nn import GatheredForm, Linear, WeightProduct
from mplug_nn.prologue import FUSED_SLOTS
from mplug_products.slot_buffers import hold
from mplug_testing.fused import FusedLinear
from mplug_testing.kernel_buffer_checks import site_of
from mplug_testing.kernel_checks import initial

ROWS, INPUTS, OUTPUTS, RANKS = 32, 128, 64, 5
"""The last of 5 ranks has fewer of 64 rows than the others."""


def gathered_forms(offer: Offer) -> dict[str, GatheredForm | str]:
    """What the products of an offer declare, by slot: a form, or the reason against one."""
    products = {slot: offer.suppliers[slot] for slot in ("Linear.product", *FUSED_SLOTS) if slot in offer.suppliers}
    return {slot: one.gathered_form() for slot, one in products.items() if isinstance(one, WeightProduct)}


def gathered_fault(offer: Offer, slot: str, form: GatheredForm, dtype: torch.dtype, device: str) -> str:
    """What differs if the copies of a weight are made of the rows of several ranks, in a sentence; or empty."""
    rows, ranks = (OUTPUTS, RANKS) if form.rows_multiple == 1 else (2 * form.rows_multiple, 2)
    generator = torch.Generator().manual_seed(11)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((ROWS, INPUTS), (rows, INPUTS), (ROWS, rows))
    )
    weight *= torch.linspace(1, 4, rows, device=device, dtype=dtype)[:, None] / 32  # ranks differ in the largest value
    buffers = initial(offer.buffers(site_of(slot, rows, INPUTS)), dtype, device)
    copies = _joined(form, weight, ranks, buffers)
    if isinstance(copies, str):
        return copies
    values = torch.full((1, 1), torch.nan, device=device, dtype=dtype).expand(weight.shape)
    found = _results(offer, slot, x, upstream, values, copies)
    right = _results(offer, slot, x, upstream, weight, ())
    for what, one, other in zip(
        ("output", "gradient of the input", "gradient of the weight"), found, right, strict=True
    ):
        if not torch.equal(one, other):
            why = "it reads weight.values, which do not exist" if one.isnan().any() else "the copies are not the same"
            return f"with copies that ranks have gathered, the {what} has other bits than with the whole weight: {why}"
    return ""


def _joined(form: GatheredForm, weight: Tensor, ranks: int, buffers: dict[str, Tensor]) -> tuple[Tensor, ...] | str:
    """The whole copies, as ranks gather them; or what is wrong with them."""
    each = -(-len(weight) // ranks)
    padded = torch.cat((weight, weight.new_zeros(ranks * each - len(weight), weight.shape[1]))).split(each)
    largest = torch.stack([form.largest(part, buffers) for part in padded]).amax(dim=0)
    parts = [form.cast(part, largest, buffers) for part in padded]
    like = form.cast(weight, form.largest(weight, buffers), buffers)
    if {len(like), *map(len, parts)} != {len(form.along_rows)}:
        return f"along_rows describes {len(form.along_rows)} copies, and cast returns {len(like)}"
    whole = []
    for number, travels in enumerate(form.along_rows):
        of_ranks = [part[number] for part in parts]
        if not travels and not all(torch.equal(of_ranks[0], one) for one in of_ranks):
            return f"copy {number} does not travel (along_rows), and ranks have different values of it"
        joined = torch.cat(of_ranks)[: len(like[number])] if travels else of_ranks[0]
        if joined.shape != like[number].shape:
            return (
                f"copy {number} has {tuple(joined.shape)} from all ranks, and {tuple(like[number].shape)} of the whole"
            )
        whole.append(joined)
    return tuple(whole)


def _results(
    offer: Offer, slot: str, x: Tensor, upstream: Tensor, weight: Tensor, copies: tuple[Tensor, ...]
) -> list[Tensor]:
    """The output of a layer, and the gradients of its input and of its weight."""
    shape = weight.shape[1], weight.shape[0]
    layer: Any = Linear(*shape, bias=False) if slot == "Linear.product" else FusedLinear(*shape, slot)
    layer.weight = nn.Parameter(weight)
    setattr(layer, slot.rpartition(".")[2], offer.suppliers[slot])
    declared = offer.buffers(site_of(slot, *weight.shape))
    if declared:
        hold(layer, slot_of(layer, slot), initial(declared, weight.dtype, str(weight.device)))
    layer.casts = copies
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight), upstream)]
