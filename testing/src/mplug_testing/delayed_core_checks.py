"""Checks that an `MLPCore` can leave the gradients of both its weights for later."""

from functools import partial
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.model.slots.offers import Offer, Site
from mplug.run.run import Run
from mplug_compile.tracer import prepare_compiler
from mplug_nn import MLP
from mplug_nn.activations import ACTIVATIONS
from mplug_products.delayed import Later, Operands, Taps, without_memory

SLOT = "MLP.core"
SHAPE, WIDTH = (2, 16, 32), 64
KINDS = ("gelu", "swiglu", "gelu_tanh", "relu2")


def kind_of_core(offer: Offer, run: Run) -> str:
    """An activation that the supplier of an offer serves; empty if it serves none of the usual ones."""
    for kind in KINDS:
        with torch.device("meta"):
            module = MLP(SHAPE[-1], WIDTH, kind, bias=True)
        if offer.answer(Site("blocks.*.mlp", SLOT, module, "blocks.0.mlp", ACTIVATIONS.needs(kind)), run) is True:
            return kind
    return ""


def later_core_fault(core: Any, kind: str, dtype: torch.dtype, device: str, compiles: bool) -> str:
    """What differs if the weights' gradients are computed later, in a sentence; empty if nothing does."""
    now, later = (_gradients(core, kind, dtype, device, compiles, postponed) for postponed in (False, True))
    for what, one, other in zip(("input", "first weight", "second weight", "bias"), now, later, strict=True):
        if not torch.equal(one, other):
            return f"the gradient of the {what} has other bits if the weights' gradients are computed later"
    return ""


def _gradients(
    core: Any, kind: str, dtype: torch.dtype, device: str, compiles: bool, postponed: bool
) -> tuple[Tensor, ...]:
    """The gradients of the input, of both weights in their sinks, and of the bias, of one pass over fixed numbers."""
    generator = torch.Generator().manual_seed(3)
    mlp = MLP(SHAPE[-1], WIDTH, kind, bias=True).to(device, dtype)
    for parameter in mlp.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    x, upstream = (torch.randn(SHAPE, generator=generator).to(device, dtype) for _ in range(2))
    linears, mlp.core = (mlp.up, mlp.down), core
    weights: list[Any] = [linear.weight for linear in linears]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        weight.main_grad_stale = torch.ones((), dtype=torch.bool, device="cpu")
    taps = _taps(mlp, x) if postponed else []
    call: Any = mlp
    if compiles:
        prepare_compiler()
        torch.compiler.reset()
        call = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):  # warnings of torch's tracer do not concern the supplier
        call(x.requires_grad_()).backward(upstream)
    for linear, tap in zip(linears, taps, strict=False):
        operands = tap.take()
        assert operands is not None, "backward has not handed out the operands"
        linear.compute_later("weight", operands)
    assert x.grad is not None
    assert mlp.up.bias is not None
    assert mlp.up.bias.grad is not None
    return x.grad, *(weight.main_grad for weight in weights), mlp.up.bias.grad


def _taps(mlp: MLP, x: Tensor) -> list[Taps]:
    """The taps of both layers, which then wait for the operands that the core declares for x."""
    linears, declared = (mlp.up, mlp.down), dict[int, Operands]()
    for number, linear in enumerate(linears):
        linear.later = Later(declare=partial(declared.__setitem__, number))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mlp(mode.from_tensor(x))
    taps = [Taps(map(without_memory, declared[number]), x.device) for number in range(len(linears))]
    for linear, tap in zip(linears, taps, strict=True):
        linear.later = tap.later
    return taps
