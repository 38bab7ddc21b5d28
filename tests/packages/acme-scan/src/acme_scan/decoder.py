"""The decoder. B batch, S sequence, D embed, V vocabulary."""

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from mplug import Flops, Init, Parameter, Plan, Segment, Slot, Unit, set_defaults
from mplug_nn import Embedding, Head, Linear, Norm

if TYPE_CHECKING:
    from acme_scan import Scanner

REVERSE = "reverse"
"""The need of a site that scans from the last position to the first."""


def scan(x: Tensor, decay: Tensor, reverse: bool) -> Tensor:
    """y_s = sigmoid(decay) y_(s-1) + x_s: the default of the slot `Scan.core`.

    x [B, S, D], decay [D] -> [B, S, D]. Sites that need 'reverse' pass `reverse`: position s then follows s + 1.
    """
    keep, y, rows = decay.sigmoid(), torch.zeros_like(x[:, 0]), []
    for row in reversed(x.unbind(1)) if reverse else x.unbind(1):
        y = keep * y + row
        rows.append(y)
    return torch.stack(rows[::-1] if reverse else rows, dim=1)


class Scan(nn.Module):
    """A recurrence between two projections."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (Slot("Scan.core", "scan", scan, serves=frozenset({REVERSE})),)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside the slot
    core: Callable[[Tensor, Tensor, bool], Tensor]

    def __init__(self, dim: int, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse
        self.enter, self.leave = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.decay = nn.Parameter(torch.empty(dim))
        set_defaults(self)

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier must offer here."""
        return frozenset({REVERSE} if self.reverse else ())

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.leave(self.core(self.enter(x), self.decay, self.reverse))
        return y


class Block(nn.Module):
    """x + scan(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, reverse: bool) -> None:
        super().__init__()
        self.norm, self.scan = Norm(dim, "rmsnorm"), Scan(dim, reverse)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h, x = self.norm(x)
        y: Tensor = x + self.scan(h)
        return y


class Decoder(nn.Module):
    """The units; the host runs them in the plan's order."""

    def __init__(self, config: "Scanner.Config") -> None:
        super().__init__()
        dim = config.hidden_size
        self.embedding = Embedding(config.vocab_size, dim)
        self.blocks = nn.ModuleDict({str(number): Block(dim, config.reverse) for number in range(config.num_layers)})
        self.head = Head(Norm(dim, "rmsnorm"), dim, config.vocab_size)


def make_plan(config: "Scanner.Config") -> Plan:
    """What the decoder publishes."""
    weight, ones = Init("normal", std=0.1), Init("constant", value=1.0)
    vocab, layers, dim = Segment("vocab", config.vocab_size, uneven="pad"), config.num_layers, config.hidden_size
    blocks = [Unit(f"blocks.{n}", ("hidden",), ("hidden",)) for n in range(layers)]
    return Plan(
        units=(
            Unit("embedding", ("tokens",), ("hidden",)),
            *blocks,
            Unit("head", ("hidden", "labels"), ("loss", "num_targets")),
        ),
        parameters={
            "embedding.weight": Parameter((vocab, "embed"), weight),
            "blocks.*.norm.weight": Parameter(("embed",), ones),
            "blocks.*.scan.enter.weight": Parameter(("state", "embed"), weight),
            "blocks.*.scan.leave.weight": Parameter(("embed", "state"), weight),
            "blocks.*.scan.decay": Parameter(("state",), ones),
            "head.norm.weight": Parameter(("embed",), ones),
            "head.project.weight": Parameter((vocab, "embed"), weight),
        },
        context={
            "tokens": ("batch", "sequence"),
            "labels": ("batch", "sequence"),
            "positions": ("batch", "sequence"),
            "sample_ids": ("batch",),
            "keys": ("batch",),
        },
        activations={"hidden": ("batch", "sequence", "embed"), "loss": (), "num_targets": ()},
        flops=Flops(6 * (layers * 2 * dim * dim + dim * config.vocab_size), 0),
    )
