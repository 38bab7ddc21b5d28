"""Gated linear attention (GLA, arXiv 2312.06635). B batch, S sequence, D embed, G key heads, H value heads."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import Branches, Step
from mplug_nn.linear import Linear
from mplug_nn.mixers.gated_norm import gated_rms_norm
from mplug_nn.mixers.mixer import Mixer, norm_entry
from mplug_nn.mixers.scan import Scan


class GatedLinearAttention(Mixer):
    """A scan without the delta rule, and with a decay for each channel of a key.

    `inputs` projects x to q, k, v and the gate z. The decay is sigmoid(f)^(1 / `temperature`), where f comes from x by
    a pair of projections of low rank. The output is norm(y) silu(z) per head. The short convolution that other mixers
    have is no part of it.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        *,
        rank: int = 16,
        temperature: float = 16.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_width, self.value_width = num_heads, key_width, value_width
        self.temperature, self.eps = temperature, eps
        keys, values = num_heads * key_width, num_heads * value_width
        self.inputs = Linear(dim, 2 * (keys + values), bias=False)
        self.decay_down, self.decay_up = Linear(dim, rank, bias=False), Linear(rank, keys, bias=True)
        self.scan = Scan("channel decay", num_heads, num_heads, key_width, value_width, key_width**-0.5)
        self.norm = nn.Parameter(torch.empty(value_width))
        self.out = Linear(values, dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters; the latent axis is divided by no strategy."""
        keys = Segment("heads", self.num_heads, self.key_width)
        values = Segment("heads", self.num_heads, self.value_width)
        return {
            "inputs.weight": Parameter(((keys, keys, values, values), "embed"), inits.weight),
            "decay_down.weight": Parameter(("decay_latent", "embed"), inits.weight),
            "decay_up.weight": Parameter((keys, "decay_latent"), inits.weight),
            "decay_up.bias": Parameter((keys,), ZEROS),
            "norm": norm_entry(),
            "out.weight": Parameter(("embed", values), inits.residual),
        }

    def plan_work(self) -> Step:
        """The projections around the scan."""
        return (Branches(("inputs", ("decay_down", "decay_up"))), "scan", "norm", "out")

    def mixed(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        values = self.out.weight.shape[1]  # this rank's, from its shard of the weights
        keys = values // self.value_width * self.key_width
        q, k, v, z = self.inputs(x).split((keys, keys, values, values), dim=-1)
        gate = self.decay_up(self.decay_down(x))
        wide = torch.promote_types(gate.dtype, torch.float32)
        decay = (logsigmoid(gate.to(wide)) / self.temperature).unflatten(-1, (-1, self.key_width))
        q, k = (part.unflatten(-1, (-1, self.key_width)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, self.value_width)) for part in (v, z))
        y = self.scan(q, k, v, decay, None, document_lengths)
        out: Tensor = self.out(gated_rms_norm(y, z, self.norm, self.eps, "norm, silu").flatten(-2))
        return out
