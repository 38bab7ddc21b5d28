"""The decoder: embedding, blocks, head. B batch, S sequence, D embed, F state."""

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import Declared, Init, Segment, declare, parameter
from mplug_nn import Embedding, Head, Linear, Norm

if TYPE_CHECKING:
    from nova_lento import Lento


class Recurrence(nn.Module):
    """h_t = a_t h_(t-1) + (1 - a_t) v_t with a_t = sigmoid(forget_t + decay), channel by channel."""

    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})

    def __init__(self, state_size: int) -> None:
        super().__init__()
        self.decay = parameter((state_size,), (Segment("mlp", state_size),), Init("constant", value=1.0))

    def forward(self, forget: Tensor, value: Tensor) -> Tensor:
        """Two times [B, S, F] -> [B, S, F]."""
        kept = torch.sigmoid(forget + self.decay)
        state, states = torch.zeros_like(value[:, 0]), []
        for a, v in zip(kept.unbind(1), value.unbind(1), strict=True):
            state = a * state + (1 - a) * v
            states.append(state)
        return torch.stack(states, dim=1)


class Block(nn.Module):
    """x + leave(silu(gate) * recurrence(forget, value)), with all three from enter(norm(x))."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: "Lento.Config") -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, "rmsnorm")
        state = Segment("mlp", config.state_size)
        enter = Linear(config.hidden_size, 3 * config.state_size, bias=False)
        self.enter = declare(enter, weight=Declared(((state, state, state), "embed")))
        self.scan = Recurrence(config.state_size)
        leave = Linear(config.state_size, config.hidden_size, bias=False)
        self.leave = declare(leave, weight=Declared(("embed", state)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h, x = self.norm(x)
        forget, value, gate = self.enter(h).chunk(3, dim=-1)  # [B, S, F] each
        y: Tensor = self.leave(F.silu(gate) * self.scan(forget, value))
        return x + y


class Decoder(nn.Module):
    """The units of a Lento; the host runs them in the plan's order."""

    def __init__(self, config: "Lento.Config") -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.num_layers)})
        self.head = Head(Norm(config.hidden_size, "rmsnorm"), config.hidden_size, config.vocab_size)
