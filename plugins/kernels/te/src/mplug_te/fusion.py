"""What the products after a norm and after an activation have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mplug_nn import FusedProduct, Narrow, Sink
from mplug_te.linear import DelayedProduct

Saved = tuple[Tensor, ...]
Buffers = Mapping[str, Tensor]


@dataclass(frozen=True)
class DelayedFusion(FusedProduct):
    """A norm or an activation that gives fp8 numbers to a product with delayed scaling."""

    product: DelayedProduct

    def cast(self, weight: Tensor, buffers: Buffers) -> Saved:
        """The copies of the weight that the product reads."""
        return self.product.cast(weight, buffers)

    def wgrad(self, operands: Saved, sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """The weight's gradient."""
        return self.product.wgrad(operands, sink, narrow, buffers)


def rows_of(x: Tensor) -> Tensor:
    """x [..., n, D] -> [N, D], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()
