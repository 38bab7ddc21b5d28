"""The product of a linear layer as a whole: the slot `Linear.product`, wider than `gather`, `gemm` and `scatter`.

A supplier of this slot owns the collectives around the matrix product, and everything that it keeps for backward. It
works in three parts: `forward`, `dgrad` and `wgrad`. The parts exchange tensors only, so that a pipeline may compute
the weight's gradient later. R ranks, I inputs, O outputs; [..., n, I] are a rank's rows, [..., R n, I] those of all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from mplug.tensors.sink import Operand, Sink, Weights
from mplug.tensors.supplier import Supplier
from mplug_nn.gemm import NOTHING, PLAIN, Gemm, arguments, weight_gradient
from mplug_products.delayed import Later, hand_out
from mplug_products.weight_product import WeightProduct

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Boundary:
    """The collectives between a rank's part of the activations and the whole operand of a product.

    A strategy states it with what it puts into `Linear.gather` and `Linear.scatter` (`Collective`). None of the
    functions is differentiable: a product's `dgrad` calls the other function of the pair.

    - `whole(part [..., n, X]) -> [..., R n, X]`: the parts of all ranks, in any dtype; or `part` itself, if the
      strategy does not split the activations.
    - `summed(partial [..., R n, X]) -> [..., n, X]`: this rank's part of the sum over the ranks; or the whole sum.
    - `largest(x [...]) -> [...]`: the elementwise maximum over the ranks.

    `chunked` is the name of the same collectives in chunks, for operators that overlap them with products
    (`ChunkedCollectives`); '' if the strategy has none.
    """

    whole: Callable[[Tensor], Tensor]
    summed: Callable[[Tensor], Tensor]
    largest: Callable[[Tensor], Tensor]
    chunked: str = ""

    def total(self, x: Tensor) -> Tensor:
        """The elementwise sum over the ranks of x, which has at most two dimensions, on every rank."""
        own = x.reshape(1, 1, -1)
        gathered = self.whole(own)
        summed = gathered.sum(dim=1) if gathered.shape[1] > 1 else self.summed(own)
        return summed.view_as(x)


@dataclass(frozen=True, eq=False)
class Collective(Supplier[P, R]):
    """A supplier of `Linear.gather` or `Linear.scatter`, with its boundary.

    Without a boundary, no supplier of a whole product can do its work.
    """

    boundary: Boundary | None = None

    @property
    def is_replaceable(self) -> bool:
        """Whether the supplier of a whole product can do its work."""
        return self.boundary is not None


class Narrow(NamedTuple):
    """The contents of the narrower slots of a site, for the supplier of `Linear.product`.

    `before` and `after` are the boundaries of `Linear.gather` and `Linear.scatter`. None: the operand is whole there,
    and no collective runs. A column-parallel product has a boundary before it, a row-parallel product one after it.
    `gemm` and its buffers are those of `Linear.gemm`, for products that call it (`Product.calls`).
    """

    gemm: Gemm = PLAIN
    before: Boundary | None = None
    after: Boundary | None = None
    buffers: Mapping[str, Tensor] = NOTHING

    def gathered(self, x: Tensor) -> Tensor:
        """The product's whole input, from this rank's part."""
        return x if self.before is None else self.before.whole(x)

    def scattered(self, y: Tensor) -> Tensor:
        """This rank's part of the product's output, from a partial or whole output."""
        return y if self.after is None else self.after.summed(y)

    def gathered_gradient(self, grad_y: Tensor) -> Tensor:
        """The gradient of the product's whole output, from that of this rank's part."""
        return grad_y if self.after is None else self.after.whole(grad_y)

    def scattered_gradient(self, grad_x: Tensor) -> Tensor:
        """The gradient of this rank's part of the input, from that of the whole input."""
        return grad_x if self.before is None else self.before.summed(grad_x)


WHOLE = Narrow()


class Product(WeightProduct):
    """The content of the slot `Linear.product`; a supplier subclasses it. It is a `WeightProduct`.

    `narrow` has the contents of the narrower slots. If `calls` names one of them, the product calls it itself.
    """

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [..., n, I] -> (this rank's part of x Wᵀ, the tensors that `dgrad` needs)."""
        raise NotImplementedError

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y -> (the gradient of x, None unless `needs_x`; the operands of `wgrad`)."""
        raise NotImplementedError

    def wgrad(
        self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Add the weight's gradient [O, I] to the sink and return None; or return it if there is no sink."""
        raise NotImplementedError

    def backward(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        sink: Sink | None,
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients at once: a supplier that overlaps one with the other overrides this method.

        The host calls it if both are needed now. The results must be bitwise equal to those of `dgrad` and `wgrad`.
        """
        grad_x, operands = self.dgrad(grad_y, weight, saved, narrow, buffers, needs_x)
        return grad_x, self.wgrad(operands, sink, narrow, buffers)


class Composed(Product):
    """The default: the products of `Linear.gemm` between the boundaries. It keeps the input as it comes, not gathered.

    Backward gathers the input again, which takes R times less memory than keeping the gathered input.
    """

    calls = ("Linear.gemm",)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Composed":
        """Itself: copies of a model have the same default."""
        return self

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gather, multiply, scatter; keeps x."""
        gemm = narrow.gemm
        y = gemm.forward(narrow.gathered(x), weight.values, **arguments(gemm.forward, narrow.buffers))
        return narrow.scattered(y), (x,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The duals in reverse order."""
        gemm, grad_y, grad_x = narrow.gemm, narrow.gathered_gradient(grad_y), None
        if needs_x:
            whole = gemm.dgrad(grad_y, weight.values, **arguments(gemm.dgrad, narrow.buffers))
            grad_x = narrow.scattered_gradient(whole)
        return grad_x, (grad_y, *saved)

    def wgrad(
        self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The operands are the gradient of the whole output, and the input as it came."""
        (grad_y, x), gemm = operands, narrow.gemm
        weight = Weights(x, *(sink or ()))
        return weight_gradient(grad_y, narrow.gathered(x), weight, gemm, arguments(gemm.wgrad, narrow.buffers))


COMPOSED = Composed()


class _Applied(torch.autograd.Function):
    """A product with its gradients. The weight's gradient goes directly to its sink.

    The sink's tensors and the buffers are arguments that both passes may write to. Such writes can be traced; a Python
    call to the sink cannot.
    """

    # Without gradients, torch's compiler omits `ctx` if as many arguments follow it as `forward` has parameters with it
    # (counting `*tensors` as one). A call never has just two arguments.
    @staticmethod
    def forward(ctx, *call):  # type: ignore[no-untyped-def]
        product, gemm, before, after, of_gemm, own, num_taps, x, value, main_grad, stale, *tensors = call
        tensors = tensors[: len(tensors) - num_taps]
        weight, narrow, buffers = _arranged(product, gemm, before, after, of_gemm, own, value, tensors)
        y, saved = product.forward(x, weight, narrow, buffers)
        ctx.save_for_backward(value, *saved)
        ctx.slots = product, gemm, before, after, of_gemm, own
        ctx.main_grad, ctx.stale, ctx.tensors, ctx.num_taps = main_grad, stale, tensors, num_taps
        return y

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        value, *saved = ctx.saved_tensors
        product, needs_x, needs_weight = ctx.slots[0], ctx.needs_input_grad[7], ctx.needs_input_grad[8]
        weight, narrow, buffers = _arranged(*ctx.slots, value, ctx.tensors)  # type: ignore[call-arg]
        grad_x, grad_weight, operands = None, None, ()
        if needs_weight:
            sink = None if ctx.main_grad is None else Sink(ctx.main_grad, ctx.stale)
            grad_x, grad_weight = product.backward(grad_y, weight, tuple(saved), sink, narrow, buffers, needs_x)
        elif needs_x or ctx.num_taps:
            grad_x, operands = product.dgrad(grad_y, weight, tuple(saved), narrow, buffers, needs_x)
        handed_out = hand_out(operands, ctx.num_taps)
        return *[None] * 7, grad_x, grad_weight, None, None, *(None for _ in ctx.tensors), *handed_out


def _arranged(  # type: ignore[no-untyped-def]
    product, gemm, before, after, of_gemm, own, value, tensors
) -> tuple[Operand, Narrow, Mapping[str, Tensor]]:
    """The weight, the narrower slots and the product's buffers of a call.

    `tensors` are the gemm's buffers, named `of_gemm`, those of the product, named `own`, and the weight's copies.
    """
    split, end = len(of_gemm), len(of_gemm) + len(own)
    buffers = {name: tensors[split + number] for number, name in enumerate(own)}
    narrow = Narrow(gemm, before, after, {name: tensors[number] for number, name in enumerate(of_gemm)})
    casts = tuple(tensors[end:]) or product.cast(value, buffers)
    return Operand(value, casts), narrow, buffers


def apply_product(
    product: Product,
    x: Tensor,
    weight: Weights,
    narrow: Narrow = WHOLE,
    buffers: Mapping[str, Tensor] = NOTHING,
    casts: tuple[Tensor, ...] = (),
    later: Later | None = None,
) -> Tensor:
    """x [..., n, I] -> this rank's part of x weightᵀ, by a product; the weight's gradient goes to its sink.

    `casts` are the results of `product.cast`. Without them, both passes call it. With `later`, backward hands out the
    operands of the weight's gradient instead of computing it.
    """
    stale = weight.stale
    if weight.main_grad is not None and stale is None:
        stale = torch.zeros((), dtype=torch.bool, device="cpu")
    taps = () if later is None else later.taps
    tensors = (*narrow.buffers.values(), *buffers.values(), *casts, *taps)
    slots = product, narrow.gemm, narrow.before, narrow.after, tuple(narrow.buffers), tuple(buffers)
    values = weight.values if later is None else weight.values.detach()
    if later is not None and later.declare is not None:
        with torch.no_grad():
            operand = Operand(values, casts or product.cast(values, buffers))
            later.declare(product.operands(x, operand, narrow, buffers))
    call = (*slots, len(taps), x, values, weight.main_grad, stale, *tensors)
    y: Tensor = _Applied.apply(*call)  # type: ignore[no-untyped-call]
    return y
