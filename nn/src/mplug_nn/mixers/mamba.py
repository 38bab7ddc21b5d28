"""Mamba-2 (arXiv 2405.21060). B batch, S sequence, D embed, G groups, H heads, N width of a state, P of a head."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ONES, ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import Step
from mplug.model.slots.declaration import Slot, set_defaults
from mplug_nn.linear import Linear
from mplug_nn.mixers.convolution import Convolution
from mplug_nn.mixers.gated_norm import SQUARES, Squares, gated_group_norm, gated_rms_norm, own_squares
from mplug_nn.mixers.mixer import A_LOG, TIME_STEPS, Mixer, convolution_entries, decay_entries, log_decay, time_step
from mplug_nn.mixers.scan import Scan


class Mamba2(Mixer):
    """A state space with one decay per head; the heads of a group share B and C.

    `inputs` projects x to z and x (heads), B and C (groups) and dt (a number per head). x, B and C pass a short
    convolution with SiLU. With the step dt = softplus(dt + dt_bias), clamped to `time_step_limit`, the decay is
    exp(-exp(A_log) dt), the key B, the value dt x, the query C. The output is norm(silu(z) (y + D x)), normalised over
    the heads of a group.

    Tensor parallelism divides heads and groups. If there are fewer groups than ranks, ranks hold copies of B and C, and
    the slot `Mamba2.squares` adds up what the norm needs of the heads of other ranks.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (SQUARES,)
    mixes: ClassVar[frozenset[str]] = frozenset()
    squares: Squares

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_width: int,
        num_groups: int,
        state_width: int,
        *,
        conv_width: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        self.num_heads, self.num_groups = num_heads, num_groups
        self.head_width, self.state_width = head_width, state_width
        self.eps, self.time_step_limit = eps, time_step_limit
        inner, states = num_heads * head_width, num_groups * state_width
        self.inputs = Linear(dim, 2 * inner + 2 * states + num_heads, bias)
        self.conv = Convolution(inner + 2 * states, conv_width, bias=conv_bias)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.scan = Scan("decay", num_heads, num_groups, state_width, head_width, 1.0)
        self.norm = nn.Parameter(torch.empty(inner))
        self.out = Linear(inner, dim, bias)
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        inner = Segment("heads", self.num_heads, self.head_width)
        states = Segment("kv_heads", self.num_groups, self.state_width, uneven="copy")
        heads = Segment("heads", self.num_heads)
        projected, channels = (inner, inner, states, states, heads), (inner, states, states)
        entries = {
            "inputs.weight": Parameter((projected, "embed"), inits.weight),
            **convolution_entries(channels, self.conv.spec.width, bias=self.conv.bias is not None),
            **decay_entries(heads, A_LOG, TIME_STEPS),
            "D": Parameter((heads,), ONES, decay=False),
            "norm": Parameter((inner,), ONES),
            "out.weight": Parameter(("embed", inner), inits.residual),
        }
        if self.inputs.bias is not None:
            entries |= {"inputs.bias": Parameter((projected,), ZEROS), "out.bias": Parameter(("embed",), ZEROS)}
        return entries

    def plan_work(self) -> Step:
        """The projections around the convolution and the scan."""
        return ("inputs", "conv", "A_log", "dt_bias", "scan", "D", "norm", "out")

    def input_linear(self) -> Linear:
        """The layer that alone reads x in `forward`."""
        return self.inputs

    def mixed(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        inner = self.out.weight.shape[1]  # this rank's, from its shard of the weights
        heads = inner // self.head_width
        projected = self.inputs(x)
        states = (projected.shape[-1] - 2 * inner - heads) // 2
        z, mixed, dt = projected.split((inner, inner + 2 * states, heads), dim=-1)
        values, b, c = self.conv(mixed, document_lengths).split((inner, states, states), dim=-1)
        values = values.unflatten(-1, (-1, self.head_width))  # [B, S, H, P]
        b, c = (part.unflatten(-1, (-1, self.state_width)) for part in (b, c))  # [B, S, G, N]
        step = time_step(dt, self.dt_bias).clamp(*self.time_step_limit)  # [B, S, H]
        decay = log_decay(self.A_log, step)
        y = self.scan(c, b, values.to(step.dtype) * step[..., None], decay, None, document_lengths)
        y = y + self.D.to(y.dtype)[:, None] * values.to(y.dtype)
        groups = states // self.state_width
        y, z = (part.reshape(*part.shape[:2], groups, -1) for part in (y.flatten(-2), z))
        weight = self.norm.unflatten(0, (groups, -1))
        width = self.num_heads // self.num_groups * self.head_width
        if y.shape[-1] == width:
            normed = gated_rms_norm(y, z, weight, self.eps, "silu, norm")
        elif self.squares is own_squares:
            raise ValueError("a strategy divides the heads of a group of Mamba-2, and does not fill 'Mamba2.squares'")
        else:
            normed = gated_group_norm(y, z, weight, self.eps, self.num_groups, width, self.squares)
        out: Tensor = self.out(normed.flatten(-2).to(projected.dtype))
        return out
