"""The feed-forward part of a transformer block."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import ClassVar, ParamSpec, TypeVar

from torch import Tensor, nn

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.model.slots.declaration import Fusible, Slot, states
from mplug.tensors.sink import Weights
from mplug.tensors.supplier import Supplier
from mplug_nn.activations import ACTIVATIONS
from mplug_nn.fusible import is_plain
from mplug_nn.linear import ADAPTERS, PLAIN, Linear
from mplug_nn.named import NeedsOf
from mplug_nn.product import COMPOSED
from mplug_nn.prologue import ACTIVATION_PRODUCT, SEPARATE, Inputs, Projected, Prologue

P = ParamSpec("P")
R = TypeVar("R")
Kind = str
"""A name of the open list `mplug.activations`: 'gelu', 'gelu_tanh', 'relu2', 'swiglu', 'geglu', 'geglu_tanh', ..."""


def activation(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """The default of the slot `MLP.activation`: x [..., F] (gated: [..., 2F], gate first) plus bias -> [..., F].

    A site whose kind is none of 'gelu', 'gelu_tanh' and 'swiglu' needs it by name: 'relu2 activation'.
    """
    x = x if bias is None else x + bias
    function = ACTIVATIONS[kind]
    return function.compute(*x.chunk(2, dim=-1)) if function.gated else function.compute(x)


ACTIVATION = Slot("MLP.activation", "activation", activation, serves=NeedsOf(ACTIVATIONS))


class Activation(nn.Module):
    """The activation between an MLP's projections, for blocks that fuse the projections with others."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (ACTIVATION,)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.gated = kind, ACTIVATIONS.load(kind).gated
        self.activation = activation

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot that computes the activation must offer here."""
        return ACTIVATIONS.needs(self.kind) if slot in (ACTIVATION.name, "MLP.core", "Experts.compute") else frozenset()

    def activate(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., F] (gated: [..., 2F], gate first) plus bias -> [..., F]."""
        return self.activation(x, bias, self.kind)


def core(
    x: Tensor, up: Weights, bias: Tensor | None, down: Weights, kind: Kind, composed: Callable[[Tensor], Tensor]
) -> Tensor:
    """The default of the slot `MLP.core`: act(x upᵀ + bias) downᵀ, [..., D] -> [..., D].

    up [F, D] (gated: [2F, D], gate first), bias [F] (gated: [2F]) and down [D, F] are this rank's shards. x is the
    output of the up projection's `Linear.gather`. The result is the input of the down projection's `Linear.scatter`.
    `composed(x)` computes the same through the narrower slots. A supplier that fuses the products with the activation
    need not call it. If it is an `MLPCore`, it can leave the gradients of both weights for later.
    """
    return composed(x)


CORE = Slot(
    "MLP.core",
    "mlp",
    core,
    calls={
        "": (ACTIVATION.name,),
        "up": ("Linear.norm_product", "Linear.product", "Linear.gemm", "Linear.scatter"),
        "down": ("Linear.gather", "Linear.activation_product", "Linear.product", "Linear.gemm"),
    },
    unless_wrapped=("Linear.norm_product", "Linear.activation_product", "Linear.product"),
    composes=True,
    multiplies=True,
)


@dataclass(frozen=True, eq=False)
class MLPCore(Supplier[P, R]):
    """A supplier of `MLP.core` whose backward can leave the gradients of both weights for later.

    `delayed(x, up, bias, down, kind, composed, later of up, later of down)` computes what the supplier computes. Where
    a `Later` (`mplug_products`) is not None, it declares, and hands out in backward, (the gradient of the product's
    output [T, O], the product's input [T, I]) instead of multiplying them. Without `delayed`, or behind a wrap,
    backward computes these gradients itself, and a pipeline that splits backward has less work to fill its bubbles.
    """

    delayed: Callable[..., Tensor] | None = None


def _adds_plainly(*linears: Linear) -> bool:
    """Whether the layers' `compute_later` multiplies such operands as an `MLPCore` hands out."""
    return all(one.content[0] is COMPOSED and one.gemm is PLAIN for one in linears)


class MLP(Activation):
    """Up projection, activation, down projection.

    `kind` is a name of the open list of activations. If it is gated (SwiGLU), gate and up are one fused matrix.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (*Activation.SLOTS, CORE)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, ffn_dim: int, kind: Kind, bias: bool) -> None:
        super().__init__(kind)
        self.up = Linear(dim, ffn_dim * (2 if self.gated else 1), bias)
        self.down = Linear(ffn_dim, dim, bias)
        self.core = core

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        mlp = Segment("mlp", self.down.weight.shape[1])
        up = (mlp, mlp) if self.gated else mlp
        entries = {
            "up.weight": Parameter((up, "embed"), inits.weight),
            "down.weight": Parameter(("embed", mlp), inits.residual),
        }
        if self.up.bias is not None:
            entries |= {"up.bias": Parameter((up,), ZEROS), "down.bias": Parameter(("embed",), ZEROS)}
        return entries

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot must offer here."""
        is_adapted = self.up.adapter is not None or self.down.adapter is not None
        return super().needs(slot, entries) | ({ADAPTERS} if slot == CORE.name and is_adapted else set())

    def input_linear(self) -> Linear | None:
        """The layer that alone reads the input of `forward`; None if the slot `MLP.core` reads it."""
        return self.up if self.core is core else None

    def fusibles(self) -> Iterator[Fusible]:
        """The activation, whose result only the down projection reads."""
        if self.core is core and is_plain(self.down) and states(self, "fusibles", "activate"):
            yield Fusible(ACTIVATION_PRODUCT, self.down, self, ACTIVATION.name, self.kind)

    def forward(self, x: Tensor | Projected) -> Tensor:
        """[B, S, D] -> [B, S, D]; or the product that x is."""
        up, down = self.up, self.down
        if self.core is core:
            y = self._whole(x)
        elif up.adapter is not None or down.adapter is not None:  # the core is the default, wrapped
            assert isinstance(x, Tensor)
            weights = Weights.of(up.weight), up.bias, Weights.of(down.weight)
            y = self.core(x, *weights, self.kind, self._whole)
        else:
            assert isinstance(x, Tensor)
            y = down.scatter(self._by_core(up.gather(x)))
        return y if down.bias is None else y + down.bias

    def _whole(self, x: Tensor | Projected) -> Tensor:
        """The output without its bias, by whole linears: their adapters and collectives included."""
        return self._activated(self.up.without_bias(x))

    def _activated(self, hidden: Tensor) -> Tensor:
        """The up projection without its bias -> the down projection without its bias."""
        up, down = self.up, self.down
        if down.activation_product is SEPARATE:
            return down.without_bias(self.activate(hidden, up.bias))
        y: Tensor = down.fused(Prologue(self.kind), Inputs(hidden, bias=up.bias))
        return y

    def _by_core(self, x: Tensor) -> Tensor:
        """The result of the supplier of `core`, with weight gradients later if it can delay them."""
        up, down, core = self.up, self.down, self.core
        arguments = x, Weights.of(up.weight), up.bias, Weights.of(down.weight), self.kind, self._composed
        is_postponed = up.later is not None or down.later is not None
        if is_postponed and isinstance(core, MLPCore) and core.delayed is not None and _adds_plainly(up, down):
            return core.delayed(*arguments, up.later, down.later)
        return core(*arguments)

    def _composed(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        return down.multiply(down.gather(self.activate(up.scatter(up.multiply(x)), up.bias)))
