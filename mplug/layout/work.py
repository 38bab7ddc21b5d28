"""What the FLOPs of a model belong to, and how a module states it: pure data without torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Window(NamedTuple):
    """Which pairs of two positions meet: those whose distance is below `size`.

    `causal`: a position meets itself and earlier ones; else, later ones too.
    """

    size: int
    causal: bool

    def pairs(self, tokens: int, squared_lengths: int) -> int:
        """The pairs in sequences with `tokens` tokens in total, whose squared lengths sum to `squared_lengths`.

        A causal window that is longer than a sequence counts half of its square. Sequences of different lengths count
        as if all had the mean length of the sequence that a token is in, which is exact if all are equally long.
        """
        length = squared_lengths / max(tokens, 1)
        width = min(float(self.size), length)
        if self.causal:
            return round(tokens * (width - width**2 / max(2 * length, 1)))
        return round(tokens * (2 * width - 1 - width * (width - 1) / max(length, 1)))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward and backward pass (2 per multiply-add; backward is twice forward).

    `per_token` counts what every token costs. `per_squared_length` counts products of all pairs of two positions in a
    sequence (of half of them, if a position meets earlier ones only). `windows` are the products for each pair of
    positions that meet in a window.
    """

    per_token: int
    per_squared_length: int
    windows: tuple[tuple[Window, int], ...] = ()

    def of(self, tokens: int, squared_lengths: int) -> int:
        """FLOPs of sequences with `tokens` tokens in total, whose squared lengths sum to `squared_lengths`."""
        of_windows = sum(flops * window.pairs(tokens, squared_lengths) for window, flops in self.windows)
        return self.per_token * tokens + self.per_squared_length * squared_lengths + of_windows

    @property
    def of_pairs(self) -> "Flops":
        """The products of pairs of positions alone."""
        return Flops(0, self.per_squared_length, self.windows)

    @property
    def meets_pairs(self) -> bool:
        """Whether there are products of pairs of positions."""
        return bool(self.per_squared_length or self.windows)

    @classmethod
    def sum(cls, parts: "Iterable[Flops]") -> "Flops":
        """The sum of all parts."""
        windows, per_token, per_squared_length = Counter[Window](), 0, 0
        for part in parts:
            per_token += part.per_token
            per_squared_length += part.per_squared_length
            windows.update(dict(part.windows))
        return cls(per_token, per_squared_length, tuple((window, one) for window, one in windows.items() if one))

    def times(self, factor: int, divisor: int = 1) -> "Flops":
        """Each of them times a fraction, rounded down."""
        windows = tuple((window, factor * one // divisor) for window, one in self.windows)
        return Flops(factor * self.per_token // divisor, factor * self.per_squared_length // divisor, windows)

    def without(self, part: "Flops") -> "Flops":
        """What remains beside a part of them."""
        return Flops.sum((self, part.times(-1)))


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
