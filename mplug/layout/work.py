"""What the FLOPs of a model belong to, and how a module states it: pure data without torch."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward and backward pass (2 per multiply-add; backward is twice forward).

    `per_token` counts what every token costs. `per_squared_length` counts products of all pairs of two positions in a
    sequence (of half of them, if a position meets earlier ones only).
    """

    per_token: int
    per_squared_length: int

    def of(self, tokens: int, squared_lengths: int) -> int:
        """FLOPs of sequences with `tokens` tokens in total, whose squared lengths sum to `squared_lengths`."""
        return self.per_token * tokens + self.per_squared_length * squared_lengths

    def without(self, part: "Flops") -> "Flops":
        """What remains beside a part of them."""
        return Flops(self.per_token - part.per_token, self.per_squared_length - part.per_squared_length)


class WeightProduct(NamedTuple):
    """A module multiplies every token by `elements` elements of its parameter `weight` (a name within the module)."""

    weight: str
    elements: int


class ActivationProduct(NamedTuple):
    """A module multiplies activations with one another: `flops` of forward and backward.

    `after_unit` says that the operands may depend on any parameter of the unit, because they are made elsewhere in it.
    """

    flops: Flops
    after_unit: bool = False


class Branches(NamedTuple):
    """Steps that take the same input, each of `parts` in turn. What follows takes the results of all of them."""

    parts: "tuple[Step, ...]"


Step = str | WeightProduct | ActivationProduct | Branches | tuple["Step", ...]
"""A step of a module's computation: each takes the result of the one before.

A text is the name of a submodule, which states its own steps, or of a parameter. A tuple is several steps in order.
"""


@dataclass(frozen=True)
class Work:
    """A part of a model's FLOPs.

    `name` is that of the parameter by which `unit` multiplies its tokens, or that of a module that multiplies
    activations with one another (`is_weight` is False). Its input depends on the inputs of the unit, and on the
    parameters that `after` names: itself, or by a module that contains them.
    """

    unit: str
    name: str
    flops: Flops
    is_weight: bool
    after: tuple[str, ...]
