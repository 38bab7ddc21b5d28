"""The FLOPs of the passes of a step, and the layers that take no part in them."""

from dataclasses import dataclass

from mplug.layout.work import Flops

NOTHING = Flops(0, 0)


@dataclass(frozen=True)
class Passes:
    """The FLOPs of a step's passes, and the names of the layers that skip a backward pass.

    `forward` computes the loss, `activations` the gradients of activations (including the whole backward pass of
    products of activations), and `weights` the gradients of weights. Products with the weights in `no_dgrad` compute no
    gradient of their input, and for those in `no_wgrad` no gradient of the weight is computed. The modules in
    `no_backward` multiply activations without a backward pass. `unstated` are the plan's FLOPs of which no module says
    what they belong to; they count as if all their passes were computed.
    """

    forward: Flops
    activations: Flops
    weights: Flops
    no_dgrad: frozenset[str] = frozenset()
    no_wgrad: frozenset[str] = frozenset()
    no_backward: frozenset[str] = frozenset()
    unstated: Flops = NOTHING

    @property
    def flops(self) -> Flops:
        """The sum over all passes."""
        return Flops.sum((self.forward, self.activations, self.weights))
