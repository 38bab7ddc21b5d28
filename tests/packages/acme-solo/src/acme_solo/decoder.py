"""The decoder, in plain torch. B batch, S sequence, D embed, F mlp, V vocabulary."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import (
    IGNORED,
    Declared,
    Flops,
    Init,
    Inits,
    Plan,
    Segment,
    Slot,
    Unit,
    declare,
    describe,
    parameter,
    set_defaults,
)

if TYPE_CHECKING:
    from acme_solo import Solo

TOKENS = ("batch", "sequence")
ONES = Init("constant", value=1.0)


def means(x: Tensor) -> Tensor:
    """[B, S, F] -> [B, S, F], the means over the positions up to each: the default of the slot `Mean.core`."""
    return x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class Mean(nn.Module):
    """leave(gate * mean(x)), with gate and x from enter."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (Slot("Mean.core", "mean", means),)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside the slot
    core: Callable[[Tensor], Tensor]

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = Segment("mlp", 2 * dim)
        self.enter = declare(nn.Linear(dim, 4 * dim, bias=False), weight=Declared(((inner, inner), "embed")))
        self.leave = declare(nn.Linear(2 * dim, dim, bias=False), weight=Declared(("embed", inner), "residual"))
        set_defaults(self)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        gate, value = self.enter(x).chunk(2, dim=-1)
        y: Tensor = self.leave(F.silu(gate) * self.core(value))
        return y


class Block(nn.Module):
    """x + mean(scale * x / rms(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = parameter((dim,), ("embed",), ONES)
        self.mean = Mean(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.mean(self.scale * x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt())
        return x + y


class Table(nn.Module):
    """A vector per token."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, dim), (Segment("vocab", vocab_size, uneven="pad"), "embed"))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, D]."""
        return F.embedding(tokens, self.weight)


class Readout(nn.Module):
    """The projection to the vocabulary, and the loss."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        vocab = Segment("vocab", vocab_size, uneven="pad")
        self.project = declare(nn.Linear(dim, vocab_size, bias=False), weight=Declared((vocab, "embed")))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels [B, S] -> (sum of the losses in nats, number of targets)."""
        loss = F.cross_entropy(self.project(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (labels != IGNORED).sum()


class Decoder(nn.Module):
    """The units; the host runs them in the plan's order."""

    def __init__(self, config: "Solo.Config") -> None:
        super().__init__()
        self.table = Table(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleDict({str(number): Block(config.hidden_size) for number in range(config.num_layers)})
        self.readout = Readout(config.vocab_size, config.hidden_size)


def make_plan(decoder: Decoder, config: "Solo.Config") -> Plan:
    """What the decoder publishes beside what its modules declare."""
    layers, dim = config.num_layers, config.hidden_size
    blocks = [Unit(f"blocks.{number}", ("hidden",), ("hidden",)) for number in range(layers)]
    return describe(decoder, Inits.normal(0.3, 0.1)).plan(
        units=(
            Unit("table", ("tokens",), ("hidden",)),
            *blocks,
            Unit("readout", ("hidden", "labels"), ("loss", "num_targets")),
        ),
        context=dict.fromkeys(("tokens", "labels", "positions"), TOKENS)
        | dict.fromkeys(("sample_ids", "keys"), ("batch",)),
        activations={"hidden": (*TOKENS, "embed"), "loss": (), "num_targets": ()},
        flops=Flops(6 * dim * (layers * 6 * dim + config.vocab_size), 0),
    )
