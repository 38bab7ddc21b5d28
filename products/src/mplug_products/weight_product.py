"""Products with weights: what all suppliers that multiply by a weight have in common, and the modules that hold them.

The host keeps copies of weights, gathers copies of rows, and postpones weight gradients by this description alone.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mplug.tensors.sink import Operand
from mplug.tensors.supplier import Statements
from mplug_products.delayed import Operands
from mplug_products.gathered_form import NO_GATHERED_FORM, GatheredForm
from mplug_products.slot_buffers import held

Buffers = Mapping[str, Tensor]
Saved = tuple[Tensor, ...]
NO_NAMES: Mapping[str, tuple[str, ...]] = {}


class WeightProduct(Statements):
    """The product of an input with a weight, and its gradients: the content of a slot; a supplier subclasses a form.

    A form of products (of one weight, together with what computes the input, of groups of rows) states what the input,
    the output and `around` are. `around` has what a call needs besides tensors of its own: collectives, for example.

    One instance serves all sites of a role. It has no state that changes. Buffers that the offer declares
    (`Offer.buffers`) arrive in `buffers`, by name; values may be written only by operators that state it
    (`mplug_nn.count`, `keep_max`, ...). The parts exchange tensors only, so that a pipeline may compute the weight's
    gradient later. They are traced, so everything that a compiler cannot look into must be an operator
    (`mplug.tensors.operator`).
    """

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Copies of a weight in other formats, which the products read; none by default.

        It depends on the weight and on buffers that are states. The host calls it once for each version of the weight
        (initialisation, load, update), or in every pass if a strategy gathers the weight for every pass.
        """
        return ()

    def gathered_form(self) -> GatheredForm | str:
        """How a strategy that gathers the weight for every pass may gather copies instead; or why it must not."""
        return NO_GATHERED_FORM

    def forward(self, x: Any, weight: Operand, around: Any, buffers: Buffers) -> tuple[Any, Saved]:
        """The input -> (the output, the tensors that `dgrad` needs)."""
        raise NotImplementedError

    def dgrad(
        self, grad_y: Any, weight: Operand, saved: Saved, around: Any, buffers: Buffers, needs_x: bool
    ) -> tuple[Any, Operands]:
        """The gradient of the output -> (that of the input, None unless `needs_x`; the operands of `wgrad`)."""
        raise NotImplementedError

    def wgrad(self, operands: Operands, sink: Any, around: Any, buffers: Buffers) -> Tensor | None:
        """Add the weight's gradient to the sink (`Sink`) and return None; or return it if there is no sink (None)."""
        raise NotImplementedError

    def operands(self, x: Any, weight: Operand, around: Any, buffers: Buffers) -> Operands:
        """The shapes and dtypes of the operands of `wgrad` for an input like x, as tensors without memory.

        The host calls it inside of torch's `FakeTensorMode`, before it postpones the weight's gradient. By default the
        shapes are those that `forward` and `dgrad` return for such tensors. A product may state them itself.
        """
        y, saved = self.forward(x, weight, around, buffers)
        return self.dgrad(torch.empty_like(y), weight, saved, around, buffers, False)[1]

    @property
    def makes_copies(self) -> bool:
        """Whether the product reads copies of its weight: a product without a `cast` of its own has none."""
        return type(self).cast is not WeightProduct.cast


class ProductModule(nn.Module):
    """A module whose slots multiply by its weights.

    A subclass names its weights in `CASTS` and `DELAYED`, and says which product multiplies by each.
    """

    CASTS: ClassVar[Mapping[str, str]] = {}
    """Weights -> the attributes with the copies that the product reads, if the host keeps them."""
    DELAYED: ClassVar[Mapping[str, str]] = {}
    """Weights -> the attributes with their `Later`, if their gradients are computed later."""

    slot_buffers: Mapping[str, tuple[str, ...]] = NO_NAMES
    """Slots -> the names of the buffers that their suppliers declare."""

    def product_of(self, weight: str) -> tuple[WeightProduct, str]:
        """The product that multiplies by a weight, and its slot."""
        raise NotImplementedError

    def buffers_of(self, weight: str) -> Buffers:
        """The buffers of the product that multiplies by a weight."""
        return held(self, self.product_of(weight)[1])

    def other_readers(self, weight: str) -> str:
        """Why code besides the product may read a weight, as a clause; empty if only the product reads it."""
        return f"{type(self).__name__} does not state that only its product reads it (other_readers)"

    def cast(self, weight: str) -> tuple[Tensor, ...]:
        """New copies of a weight, as the product reads them."""
        product, _ = self.product_of(weight)
        return product.cast(getattr(self, weight), self.buffers_of(weight))

    def waits(self, slot: str, dtype: torch.dtype) -> str:
        """Why the CPU waits for the device in the default of a slot that computes in `dtype`; empty if it does not."""
        return ""

    def compute_later(self, weight: str, operands: Operands) -> None:
        """Add the gradient of a weight to its sink, from operands that a pass has handed out."""
        raise NotImplementedError
