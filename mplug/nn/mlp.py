"""The feed-forward part of a transformer block."""

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.plan import Parameter, Segment
from mplug.nn.fusible import Fusible, is_plain, states
from mplug.nn.inits import ZEROS, Entries, Inits
from mplug.nn.linear import Linear
from mplug.nn.prologue import ACTIVATION_PRODUCT, SEPARATE, Inputs, Projected, Prologue
from mplug.nn.sink import Weights

Kind = Literal["gelu", "gelu_tanh", "swiglu"]


def activation(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """The default of the slot `MLP.activation`: x [..., F] (swiglu: [..., 2F], gate first) plus bias -> [..., F]."""
    x = x if bias is None else x + bias
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Activation(nn.Module):
    """The activation between an MLP's projections, for blocks that fuse the projections with others."""

    SLOTS: ClassVar[tuple[str, ...]] = ("MLP.activation",)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.activation = activation

    def activate(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., F] (swiglu: [..., 2F], gate first) plus bias -> [..., F]."""
        return self.activation(x, bias, self.kind)


def core(
    x: Tensor, up: Weights, bias: Tensor | None, down: Weights, kind: Kind, composed: Callable[[Tensor], Tensor]
) -> Tensor:
    """The default of the slot `MLP.core`: act(x upᵀ + bias) downᵀ, [..., D] -> [..., D].

    up [F, D] (swiglu: [2F, D], gate first), bias [F] (swiglu: [2F]) and down [D, F] are this rank's shards. x is the
    output of the up projection's `Linear.gather`. The result is the input of the down projection's `Linear.scatter`.
    `composed(x)` computes the same through the narrower slots. A supplier that fuses the products with the activation
    need not call it.
    """
    return composed(x)


core.only_composes = True  # type: ignore[attr-defined]  # its needs are those of the slots that it calls


class MLP(Activation):
    """Up projection, activation, down projection.

    The activation is GELU (arXiv 1606.08415; exact, or with tanh as in GPT-2) or SwiGLU (arXiv 2002.05202). For SwiGLU,
    gate and up are one fused matrix.
    """

    SLOTS = (*Activation.SLOTS, "MLP.core")
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, ffn_dim: int, kind: Kind, bias: bool) -> None:
        super().__init__(kind)
        self.up = Linear(dim, ffn_dim * (2 if kind == "swiglu" else 1), bias)
        self.down = Linear(ffn_dim, dim, bias)
        self.core = core

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        mlp = Segment("mlp", self.down.weight.shape[1])
        up = (mlp, mlp) if self.kind == "swiglu" else mlp
        entries = {
            "up.weight": Parameter((up, "embed"), inits.weight),
            "down.weight": Parameter(("embed", mlp), inits.residual),
        }
        if self.up.bias is not None:
            entries |= {"up.bias": Parameter((up,), ZEROS), "down.bias": Parameter(("embed",), ZEROS)}
        return entries

    def input_linear(self) -> Linear | None:
        """The layer that alone reads the input of `forward`; None if the slot `MLP.core` reads it."""
        return self.up if self.core is core else None

    def fusibles(self) -> Iterator[Fusible]:
        """The activation, whose result only the down projection reads."""
        if self.core is core and is_plain(self.down) and states(self, "fusibles", "activate"):
            yield Fusible(ACTIVATION_PRODUCT, self.down, self, "MLP.activation", self.kind)

    def forward(self, x: Tensor | Projected) -> Tensor:
        """[B, S, D] -> [B, S, D]; or the product that x is."""
        up, down = self.up, self.down
        if self.core is core:
            y = self._activated(up.without_bias(x))
        else:
            assert isinstance(x, Tensor)
            weights = Weights.of(up.weight), up.bias, Weights.of(down.weight)
            y = down.scatter(self.core(up.gather(x), *weights, self.kind, self._composed))
        return y if down.bias is None else y + down.bias

    def _activated(self, hidden: Tensor) -> Tensor:
        """The up projection without its bias -> the down projection without its bias."""
        up, down = self.up, self.down
        if down.activation_product is SEPARATE:
            return down.without_bias(self.activate(hidden, up.bias))
        y: Tensor = down.fused(Prologue(self.kind), Inputs(hidden, bias=up.bias))
        return y

    def _composed(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        return down.multiply(down.gather(self.activate(up.scatter(up.multiply(x)), up.bias)))
