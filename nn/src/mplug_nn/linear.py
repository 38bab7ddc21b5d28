"""A linear layer whose matrix products and collectives are slots."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.work import Branches, Step, WeightProduct
from mplug.model.slots.declaration import Slot
from mplug.tensors.sink import Sink, Weights
from mplug_nn.gemm import NOTHING, PLAIN, Gemm, weight_gradient
from mplug_nn.product import COMPOSED, Boundary, Collective, Narrow, Product, apply_product
from mplug_nn.prologue import (
    ACTIVATION_PRODUCT,
    NORM_PRODUCT,
    SEPARATE,
    FusedProduct,
    Inputs,
    Projected,
    Prologue,
    apply_fused,
)
from mplug_products.delayed import Later, Operands
from mplug_products.slot_buffers import held
from mplug_products.weight_product import ProductModule

__all__ = ["PLAIN", "Gemm", "Linear", "multiply", "weight_gradient"]


def multiply(x: Tensor, weight: Weights, gemm: Gemm, buffers: Mapping[str, Tensor] = NOTHING) -> Tensor:
    """x [..., I] -> x weightᵀ [..., O], with the products of `gemm`; the weight's gradient goes to its sink.

    `buffers` are those that the supplier of `gemm` declares.
    """
    return apply_product(COMPOSED, x, weight, Narrow(gemm, buffers=buffers))


def _identity(x: Tensor) -> Tensor:
    """The identity, without a collective: the default of the slots `Linear.gather` and `Linear.scatter`.

    `Linear.gather` runs before the product: x [..., in] -> the product's input [..., in]. `Linear.scatter` runs after
    it: the product's y [..., out] -> [..., out].
    """
    return x


COMPUTES = ("forward", "without_bias", "unadapted", "multiply")
"""The methods of `Linear` that compute."""
GATHER = Slot("Linear.gather", "linear", _identity)
SCATTER = Slot("Linear.scatter", "linear", _identity)
GEMM = Slot("Linear.gemm", "linear", PLAIN, multiplies=True, buffers=("",))
PRODUCT = Slot(
    "Linear.product",
    "linear",
    COMPOSED,
    calls={"": (GEMM.name,)},
    composes=True,
    multiplies=True,
    collectives=(GATHER.name, SCATTER.name),
    buffers=("",),
)
NORM_SLOT, ACTIVATION_SLOT = (
    replace(
        PRODUCT,
        name=name,
        kind=name.partition(".")[2],
        default=SEPARATE,
        calls={"": (PRODUCT.name, GEMM.name)},
        unless_wrapped=(PRODUCT.name,),
        fuses=fuses,
    )
    for name, fuses in ((NORM_PRODUCT, "norm"), (ACTIVATION_PRODUCT, "activation"))
)
ADAPTERS = "adapters"
"""The need of a site whose supplier multiplies by weights that have adapters, and would not call the adapters."""


def boundary_of(collective: Any) -> Boundary | None:
    """The boundary of what a strategy puts into `Linear.gather` or `Linear.scatter`; None without a collective.

    Raises ValueError if the strategy does not state it (`Collective`).
    """
    if collective is _identity:
        return None
    if not isinstance(collective, Collective) or collective.boundary is None:
        raise ValueError("the collective states no boundary (mplug_nn.Collective)")
    return collective.boundary


class LinearAdapter(nn.Module):
    """An adapter of a `Linear` that calls the product itself, and that states whether it reads the weight."""

    reads_weight: bool = True
    """Whether it reads `linear.weight`. If so, a strategy that gathers weights gathers this one as it is."""
    reads_pass: bool = False
    """Whether it reads tensors of the pass that lie in it, beside x (keys and positions of dropout).

    If so, nothing may call it with a part of the sequence, or again while other micro batches are in flight.
    """

    def around(self, x: Tensor, linear: "Linear") -> Tensor:
        """x [..., in] as it comes -> [..., out], in place of the product without bias.

        It calls `linear.unadapted(x)` for the product. So it can pass another input, and its backward can take part in
        the gradient of the input.
        """
        raise NotImplementedError


class Linear(ProductModule):
    """y = x Wᵀ + b, with weight [out, in] as in torch.

    `gather` runs before the product and `scatter` after it. Both are identities until a strategy puts its collective
    there. A supplier of `product` does the work of all three narrower slots. If a block states that the layer alone
    reads the result of a norm or of an activation, a supplier of `norm_product` or `activation_product` computes both.

    `adapter` is None, or a module that a plugin has attached (`mplug.Model.attach`). It is called as adapter(x, y,
    linear) with the input x [..., in] as it comes, the product y [..., out] without bias, and this linear. Its result
    [..., out] takes the place of y. A `LinearAdapter` is called as around(x, linear) instead. Code that multiplies by
    the weight without calling the linear must state the need `ADAPTERS` (`needs`), and must not run if there is an
    adapter. A block that cannot state it sets `adaptable` to False, and the linear then has no adapter.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (PRODUCT, GEMM, GATHER, SCATTER, NORM_SLOT, ACTIVATION_SLOT)
    """A layer has the last two only where a block states it (`mplug_nn.Fusible`)."""
    CASTS: ClassVar[Mapping[str, str]] = {"weight": "casts"}
    casts: tuple[Tensor, ...] = ()
    DELAYED: ClassVar[Mapping[str, str]] = {"weight": "later"}
    later: Later | None = None
    mixes: ClassVar[frozenset[str]] = frozenset()
    adaptable = True
    adapter: nn.Module | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_module("adapter", None)
        self.product: Product = COMPOSED
        self.norm_product: FusedProduct = SEPARATE
        self.activation_product: FusedProduct = SEPARATE
        self.gemm = PLAIN
        self.gather: Callable[[Tensor], Tensor] = _identity
        self.scatter: Callable[[Tensor], Tensor] = _identity

    def without_bias(self, x: Tensor | Projected) -> Tensor:
        """x [..., in] -> x Wᵀ [..., out], for callers that fuse the bias; or the product that x is (`Projected`)."""
        if isinstance(x, Projected):
            return x.values
        if self.adapter is None:
            return self.unadapted(x)
        if isinstance(self.adapter, LinearAdapter):
            return self.adapter.around(x, self)
        adapted: Tensor = self.adapter(x, self.unadapted(x), self)
        return adapted

    def unadapted(self, x: Tensor) -> Tensor:
        """x [..., in] -> x Wᵀ [..., out], by the contents of the slots, without the bias and the adapter.

        An adapter may call it several times if it freezes the weight.
        """
        return self.scatter(self.multiply(self.gather(x))) if self.product is COMPOSED else self._multiplied(x)

    def multiply(self, x: Tensor) -> Tensor:
        """The output [..., in] of `gather` -> x Wᵀ [..., out], the input of `scatter`, without the adapter."""
        if self.product is COMPOSED:
            return self._multiplied(x)
        return multiply(x, Weights.of(self.weight), self.gemm, self._held("Linear.gemm"))

    def _multiplied(self, x: Tensor) -> Tensor:
        own, narrow = self._held("Linear.product"), self._narrow(self.product)
        kept = (self.casts, self.later) if self.content[0] is self.product else ((), None)
        return apply_product(self.product, x, Weights.of(self.weight), narrow, own, *kept)

    def fused(self, prologue: Prologue, inputs: Inputs) -> Any:
        """The product, without a bias, of a prologue's result; for a norm, (the product, the residual stream)."""
        product, slot = self.content
        assert isinstance(product, FusedProduct)
        weight, own = Weights.of(self.weight), self._held(slot)
        return apply_fused(product, prologue, inputs, weight, self._narrow(product), own, self.casts, self.later)

    def plan_work(self) -> Step:
        """The product with the weight; an adapter takes the same input."""
        product = WeightProduct("weight", self.weight.numel())
        return product if self.adapter is None else Branches((product, "adapter"))

    @property
    def content(self) -> tuple[Product | FusedProduct, str]:
        """What multiplies by the weight, and its slot."""
        if self.norm_product is not SEPARATE:
            return self.norm_product, "Linear.norm_product"
        if self.activation_product is not SEPARATE:
            return self.activation_product, "Linear.activation_product"
        return self.product, "Linear.product"

    @property
    def is_bare(self) -> bool:
        """Whether the layer is x Wᵀ alone: no supplier, collective or adapter, and no weight gradient that comes later.

        Code that multiplies by the weight of such a layer itself, with its gradient, takes nothing from a plugin.
        """
        slots = self.product is COMPOSED and self.gemm is PLAIN and self.gather is self.scatter is _identity
        return slots and self.bias is None and self.adapter is None and self.later is None and not self.casts

    def forward(self, x: Tensor | Projected) -> Tensor:
        """x [..., in] -> [..., out]; or the product that x is, plus the bias."""
        y = self.without_bias(x)
        return y if self.bias is None else y + self.bias

    @property
    def computes_as_linear(self) -> bool:
        """Whether no subclass has overridden how a linear layer computes its product."""
        return all(getattr(type(self), method) is getattr(Linear, method) for method in COMPUTES)

    def product_of(self, weight: str) -> tuple[Product | FusedProduct, str]:
        """`content`: it multiplies by the only weight."""
        return self.content

    def other_readers(self, weight: str) -> str:
        """Subclasses that compute in another way, blocks that take the weight, and adapters that read it."""
        if not self.computes_as_linear:
            return f"{type(self).__name__} changes how a linear layer computes"
        if not self.adaptable:
            return "its block may read it without calling the layer (Linear.adaptable)"
        if self.adapter is None or (isinstance(self.adapter, LinearAdapter) and not self.adapter.reads_weight):
            return ""
        return "its adapter may read it (reads_weight)"

    def compute_later(self, weight: str, operands: Operands) -> None:
        """Add the gradient of the weight to its sink, from operands that a pass has handed out (`later`)."""
        own = getattr(self, weight)
        product, slot = self.content
        sink = Sink(own.main_grad, own.main_grad_stale)
        product.wgrad(operands, sink, self._narrow(product), self._held(slot))

    def _narrow(self, product: Product | FusedProduct) -> Narrow:
        """The narrower slots' contents for a product; the default leaves the collectives to autograd."""
        of_gemm = self._held("Linear.gemm")
        if product is COMPOSED:
            return Narrow(self.gemm, buffers=of_gemm)
        return Narrow(self.gemm, boundary_of(self.gather), boundary_of(self.scatter), of_gemm)

    def _held(self, slot: str) -> Mapping[str, Tensor]:
        return held(self, slot) if self.slot_buffers else NOTHING
