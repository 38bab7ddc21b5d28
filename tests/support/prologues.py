"""Claims about a norm or an activation together with the product of its result. B batch, S sequence, D in, O out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mplug.tensors.sink import Weights
from mplug_nn import Boundary, DelayedScaling, FusedProduct, Inputs, Narrow, Prologue
from mplug_nn.activations import is_gated
from mplug_nn.prologue import apply_fused
from mplug_testing.fused import composed

B, S, D, O_ = 2, 24, 64, 128
NORMS = ("layernorm", "rmsnorm")
Buffers = Callable[[], Mapping[str, Tensor]]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.detach().double()).norm() / right.detach().double().norm())


def inputs_of(kind: str, full: bool, *rows: int) -> Inputs:
    """Of a norm or an activation; `full`: with a bias, and a residual if there may be one."""
    if kind not in NORMS:
        width = D * (2 if is_gated(kind) else 1)
        return Inputs(drawn(*rows, width, seed=1), bias=drawn(width, seed=2) if full else None)
    residual, bias = (drawn(*rows, D, seed=3), drawn(D, seed=4, scale=0.2)) if full else (None, None)
    return Inputs(drawn(*rows, D, seed=1), residual, 1 + drawn(D, seed=2, scale=0.2), bias)


def outcome(call: Any, inputs: Inputs, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The outputs of a call with inputs and a weight, and the gradients of all of them."""
    weight = drawn(O_, D, seed=6, scale=0.1)
    leaves = [one.to(dtype, copy=True).requires_grad_() for one in (*inputs, weight) if one is not None]
    given = iter(leaves)
    own = Inputs(*(None if one is None else next(given) for one in inputs))  # type: ignore[arg-type]
    found = call(own, next(given))
    outputs = [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]
    upstream = [drawn(*one.shape, seed=7 + number).to(dtype) for number, one in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def assert_exact(product: FusedProduct, kind: str, full: bool, rows: tuple[int, ...], buffers: Buffers) -> None:
    """Outputs and gradients are in bf16, and within the rounding of fp8 those of the composition in fp64."""
    inputs, prologue = inputs_of(kind, full, *rows), Prologue(kind, 1e-5)
    exact = outcome(lambda own, matrix: composed(prologue, own, matrix), inputs, torch.float64)
    fused = outcome(lambda own, m: apply_fused(product, prologue, own, Weights(m), Narrow(), buffers()), inputs)
    for one, right in zip(fused, exact, strict=True):
        assert (one.shape, one.dtype) == (right.shape, torch.bfloat16)
        assert error(one, right) < 0.1


def travelled(product: FusedProduct, kind: str, side: str, buffers: Buffers) -> list[tuple[torch.dtype, int]]:
    """The types and lengths of what a boundary gathers, after checking that the results are those of the whole.

    Two equal ranks: each has the same half of the sequence.
    """
    found: list[tuple[torch.dtype, int]] = []

    def whole(part: Tensor) -> Tensor:
        found.append((part.dtype, part.shape[1]))
        return torch.cat((part, part), 1)

    boundary = Boundary(whole, lambda y: y[:, :S] + y[:, S:], lambda x: x)
    inputs, prologue = inputs_of(kind, True, B, S if side == "before" else 2 * S), Prologue(kind, 1e-5)

    narrow = Narrow(before=boundary) if side == "before" else Narrow(after=boundary)

    def fused(own: Inputs, matrix: Tensor) -> Any:
        return apply_fused(product, prologue, own, Weights(matrix), narrow, buffers())

    def plain(own: Inputs, matrix: Tensor) -> Any:
        y, summed = composed(prologue, own, matrix)
        return torch.cat((y, y), 1) if side == "before" else boundary.summed(y), summed

    for one, right in zip(outcome(fused, inputs), outcome(plain, inputs), strict=True):
        assert error(one, right) < 0.1
    return found


def kept_by(call: Callable[[], Any]) -> tuple[Any, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """The result of a call; the types and shapes of the large tensors that it saves for backward, without weights."""
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() >= B * S * D and tensor.shape != (O_, D):
            kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return call(), kept


def kept_and_statistic(
    product: FusedProduct, kind: str, buffers: Mapping[str, Tensor]
) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], float, float]:
    """(the large tensors kept for backward, the statistic of a step, the largest result of the prologue in fp32).

    Checks that backward does not change the statistic, and that the scale of the state is used.
    """
    inputs = inputs_of(kind, False, B, S)
    wide = Inputs(*(None if one is None else one.float() for one in inputs))  # type: ignore[arg-type]
    result, _ = composed(Prologue(kind, 1e-5), wide, torch.eye(D))
    inputs.x.requires_grad_()
    weights = Weights(drawn(O_, D, seed=6, scale=0.1).requires_grad_())

    def call() -> Tensor:
        found = apply_fused(product, Prologue(kind, 1e-5), inputs, weights, Narrow(), buffers)
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y

    first, kept = kept_by(call)
    statistic = float(buffers["input"])
    first.sum().backward()
    assert float(buffers["input"]) == statistic
    buffers[DelayedScaling.scale_name("input")].fill_(1e4)  # so large that all values are cut off
    assert error(call(), first) > 0.5
    return kept, statistic, float(result.abs().max())
