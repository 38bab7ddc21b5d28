"""Where a model's blocks have a prologue that one linear layer alone reads (`mplug_nn.prologue`).

Blocks state it, because it follows from their code. A statement about a method holds only for the class that makes it:
a subclass may override the method.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from mplug.model.slots.declaration import Fusible, states
from mplug_nn.linear import Linear
from mplug_nn.norm import NORM_RESIDUAL, Norm
from mplug_nn.prologue import NORM_PRODUCT, SEPARATE, Inputs, Projected, Prologue


def fusible_norm(norm: nn.Module, reader: nn.Module | None) -> Iterator[Fusible]:
    """The norm whose result a module takes as its first argument, if one linear layer of the module alone reads it.

    The module states this layer in its method `input_linear`. It accepts `Projected` in place of the argument.
    """
    if reader is None or not isinstance(norm, Norm) or type(norm).forward is not Norm.forward:
        return
    linear = _input_linear(reader) if states(reader, "input_linear", "forward") else None
    if linear is not None and is_plain(linear):
        yield Fusible(NORM_PRODUCT, linear, norm, NORM_RESIDUAL.name, norm.kind)


def is_plain(linear: nn.Module) -> bool:
    """Whether a module computes as `Linear` does; a subclass, or an adapter, may add something to the product."""
    return isinstance(linear, Linear) and linear.adapter is None and linear.computes_as_linear


def normed(norm: Norm, reader: nn.Module | None, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(the first argument of `reader`, the residual stream): the norm of x + residual, or `Projected`.

    x and residual [..., D]. It is `Projected` if a supplier of `Linear.norm_product` computes the norm.
    """
    linear = None if reader is None else _input_linear(reader)
    if linear is None or linear.norm_product is SEPARATE:
        found: tuple[Tensor, Tensor] = norm(x, residual)
        return found
    inputs = Inputs(x, residual, norm.weight, norm.bias)
    y, summed = linear.fused(Prologue(norm.kind, norm.eps), inputs)
    return Projected(y), summed  # type: ignore[return-value]  # the reader hands it to its linear layer only


def _input_linear(reader: nn.Module) -> Linear | None:
    method = getattr(type(reader), "input_linear", None)
    linear = None if method is None else method(reader)
    return linear if isinstance(linear, Linear) else None
