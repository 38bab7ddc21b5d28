"""Checks that a product's weight gradient can be computed after the pass, from the operands that the pass hands out."""

from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.layout.plan import Init, Parameter
from mplug.model.slots.declaration import slot_of
from mplug.model.slots.offers import Offer, Site
from mplug.tensors.sink import Weights
from mplug_compile.tracer import prepare_compiler
from mplug_nn import Experts, Linear
from mplug_nn.grouped import apply_grouped
from mplug_nn.prologue import FUSED_SLOTS
from mplug_products.delayed import Later, Operands, Taps, without_memory
from mplug_products.slot_buffers import hold
from mplug_testing.fused import FusedLinear
from mplug_testing.grouped import expert_site
from mplug_testing.kernel_checks import initial

SLOTS = ("Linear.product", *FUSED_SLOTS, "Experts.product")
ROWS, INPUTS, OUTPUTS, EXPERTS = 32, 32, 48, 2
OF_AUTOGRAD = ("returned an invalid gradient", "returned an incorrect number of gradients")
"""torch's words for gradients whose shapes or number are not those of the tensors, here the declared operands."""


class _Experts(nn.Module):
    """The first product of two experts, each with half of the rows."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.experts = Experts(INPUTS, OUTPUTS, EXPERTS, "gelu")
        self.experts.product = product
        self.counts = nn.Buffer(torch.full((EXPERTS,), ROWS // EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """rows [M, I] -> [M, O]."""
        up = Weights.of(self.experts.up)
        own = self.experts.buffers_of("up")
        return apply_grouped(self.experts.product, x, self.counts, up, later=self.experts.up_later, buffers=own)


def later_fault(offer: Offer, slot: str, dtype: torch.dtype, device: str, compiles: bool, kind: str = "") -> str:
    """What differs if the gradient of a weight is computed later, in a sentence; empty if nothing does.

    `kind` is that of the prologue of a fused slot.
    """
    now_x, now_weight, _ = _gradients(offer, slot, dtype, device, None, False, kind)
    taps = Taps(_declared(offer, slot, dtype, device, kind), torch.device(device))
    try:
        later_x, _, module = _gradients(offer, slot, dtype, device, taps.later, compiles, kind)
    except RuntimeError as error:
        if not any(words in str(error) for words in OF_AUTOGRAD):
            raise
        return f"`operands` declares other operands of `wgrad` than `dgrad` returns: {error}"
    operands = taps.take()
    assert operands is not None
    owner, weight = (module.experts, "up") if slot == "Experts.product" else (module, "weight")
    owner.compute_later(weight, operands)
    total = getattr(owner, weight).main_grad
    for what, one, other in (("input", later_x, now_x), ("weight", total, now_weight)):
        if not torch.equal(one, other):
            return (
                f"the gradient of the {what} has other bits if the weight's gradient is computed later; `backward` "
                f"must compute what `dgrad` and `wgrad` compute, from the operands alone"
            )
    return ""


def _gradients(
    offer: Offer, slot: str, dtype: torch.dtype, device: str, later: Later | None, compiled: bool, kind: str
) -> tuple[Tensor, Tensor, Any]:
    """(the gradient of the input, that of the weight in its sink, the module) of one pass over fixed numbers."""
    module, weight, x, upstream = _prepared(offer, slot, dtype, device, later, kind)
    call = module
    if compiled:
        prepare_compiler()
        torch.compiler.reset()
        call = torch.compile(module, backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    with catch_warnings(action="ignore"):  # warnings of torch's tracer do not concern the supplier
        (grad_x,) = torch.autograd.grad(call(x), x, upstream) if later is None else _with_taps(call, x, upstream)
    return grad_x, weight.main_grad.clone(), module


def _declared(offer: Offer, slot: str, dtype: torch.dtype, device: str, kind: str) -> Operands:
    """The operands of the weight's gradient that the product declares for the trial, on the meta device."""
    found: list[Operands] = []
    module, _, x, _ = _prepared(offer, slot, dtype, device, Later(declare=found.append), kind)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(x))
    return tuple(map(without_memory, found[0]))


def _prepared(
    offer: Offer, slot: str, dtype: torch.dtype, device: str, later: Later | None, kind: str
) -> tuple[Any, Any, Tensor, Tensor]:
    """(the module with the supplier, its weight with a sink, the input, the gradient of the output)."""
    module = _module(offer, slot, kind).to(device, dtype)
    weight = module.experts.up if slot == "Experts.product" else module.weight
    generator = torch.Generator().manual_seed(3)
    x, upstream, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in ((ROWS, INPUTS), (ROWS, OUTPUTS), tuple(weight.shape))
    )
    with torch.no_grad():
        weight.copy_(values)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    weight.main_grad_stale = torch.ones((), dtype=torch.bool, device="cpu")
    if slot != "Experts.product":
        setattr(module, slot.rpartition(".")[2], offer.suppliers[slot])
        module.later = later
        entry = Parameter(("mlp", "embed"), Init("normal"))
        declared = offer.buffers(Site("blocks.*.part", slot, module, "blocks.0.part", parameters={"weight": entry}))
        if declared:
            hold(module, slot_of(module, slot), initial(declared, dtype, device))
    else:
        module.experts.up_later = later
        declared = offer.buffers(expert_site(INPUTS, OUTPUTS))
        if declared:
            hold(module.experts, slot_of(module.experts, slot), initial(declared, dtype, device))
    return module, weight, x, upstream


def _module(offer: Offer, slot: str, kind: str) -> Any:
    if slot == "Experts.product":
        return _Experts(offer.suppliers[slot])
    if slot == "Linear.product":
        return Linear(INPUTS, OUTPUTS, bias=False)
    return FusedLinear(INPUTS, OUTPUTS, slot, kind)


def _with_taps(call: Any, x: Tensor, upstream: Tensor) -> tuple[Tensor]:
    call(x).backward(upstream)
    assert x.grad is not None
    return (x.grad,)
