"""The FLOPs of the passes of a step, and the layers that take no part in them."""

from dataclasses import dataclass

from mplug.layout.plan import Flops


@dataclass(frozen=True)
class Passes:
    """The FLOPs of a step's passes, and the names of the layers that skip a backward pass.

    `forward` computes the loss, `activations` the gradients of activations (including all of attention's backward), and
    `weights` the gradients of weights. The products in `no_dgrad` compute no gradient of their input, those in
    `no_wgrad` no gradient of their weight. The attention modules in `no_backward` have no backward pass.
    """

    forward: Flops
    activations: Flops
    weights: Flops
    no_dgrad: frozenset[str] = frozenset()
    no_wgrad: frozenset[str] = frozenset()
    no_backward: frozenset[str] = frozenset()

    @property
    def flops(self) -> Flops:
        """The sum over all passes."""
        parts = (self.forward, self.activations, self.weights)
        return Flops(sum(part.per_token for part in parts), sum(one.per_squared_length for one in parts))
