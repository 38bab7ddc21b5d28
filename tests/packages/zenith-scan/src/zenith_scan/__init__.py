"""A supplier of `Scan.core` in a logarithmic number of steps, a wrap of the slot, and a rival supplier."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Wrap, hookimpl, kernel

if TYPE_CHECKING:
    from torch import Tensor

Core = Callable[["Tensor", "Tensor", bool], "Tensor"]


@kernel("Scan.core", serves={"reverse"}, captures=True)
def doubling(x: "Tensor", decay: "Tensor", reverse: bool) -> "Tensor":
    """Every step adds what lies twice as far behind (Hillis and Steele 1986); x [B, S, D], decay [D] -> [B, S, D]."""
    from torch.nn.functional import pad  # here, because choosing a plugin must not import torch

    y, keep, step = x.flip(1) if reverse else x, decay.sigmoid(), 1
    while step < x.shape[1]:
        y = y + keep**step * pad(y[:, :-step], (0, 0, step, 0))
        step *= 2
    return y.flip(1) if reverse else y


class Empty(BaseModel):
    """No options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Halves:
    """An extension that runs the scan on the two halves of the features, one after the other."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Wrap]:
        """A wrap that calls the supplier twice."""
        return [Wrap("Scan.core", halved, layer=0, serves=frozenset({"reverse"}))]


def halved(inner: Core) -> Core:
    """The scan of each half; features do not mix."""

    def core(x: "Tensor", decay: "Tensor", reverse: bool) -> "Tensor":
        from torch import cat

        middle = x.shape[2] // 2
        parts = zip(x.tensor_split([middle], 2), decay.tensor_split([middle]), strict=True)
        return cat([inner(part, own, reverse) for part, own in parts], dim=2)

    return core


class Claimant:
    """An extension that fills the slot, and wraps it where `Halves` does."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer | Wrap]:
        """A supplier that every run counts, whatever kernel it names."""
        return [Offer({"Scan.core": doubling.function}, serves={"reverse"})]
