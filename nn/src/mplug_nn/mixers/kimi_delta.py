"""Kimi delta attention (KDA, arXiv 2510.26692). B batch, S sequence, D embed, H heads, K key width, V value width."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import Branches, Step
from mplug_nn.linear import Linear
from mplug_nn.mixers.convolution import Convolution
from mplug_nn.mixers.gated_norm import gated_rms_norm, unit_length
from mplug_nn.mixers.mixer import (
    A_LOG,
    TIME_STEPS,
    Mixer,
    convolution_entries,
    decay_entries,
    log_decay,
    norm_entry,
    time_step,
)
from mplug_nn.mixers.scan import Scan


class KimiDeltaAttention(Mixer):
    """A scan with the delta rule and a decay for each channel of a key.

    `inputs` projects x to q, k, v and b (a number per head); q, k and v pass a short convolution with SiLU, and q and k
    have length 1. The decay exp(-exp(A_log) softplus(f + dt_bias)) and the gate z come from x by a pair of projections
    of low rank each. The output is norm(y) sigmoid(z) per head. All ranks hold the projections to latent vectors.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        *,
        conv_width: int = 4,
        eps: float = 1e-5,
        rank: int | None = None,
        negative_eigenvalues: bool = False,
        gate_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_width, self.value_width, self.eps = num_heads, key_width, value_width, eps
        self.negative_eigenvalues = negative_eigenvalues
        keys, values, rank = num_heads * key_width, num_heads * value_width, rank or value_width
        self.inputs = Linear(dim, 2 * keys + values + num_heads, bias=False)
        self.conv = Convolution(2 * keys + values, conv_width)
        self.decay_down, self.decay_up = Linear(dim, rank, bias=False), Linear(rank, keys, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.scan = Scan("channel delta", num_heads, num_heads, key_width, value_width, key_width**-0.5)
        self.gate_down, self.gate_up = Linear(dim, rank, bias=False), Linear(rank, values, gate_bias)
        self.norm = nn.Parameter(torch.empty(value_width))
        self.out = Linear(values, dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters; the latent axes are divided by no strategy."""
        keys = Segment("heads", self.num_heads, self.key_width)
        values = Segment("heads", self.num_heads, self.value_width)
        heads = Segment("heads", self.num_heads)
        bias = {"gate_up.bias": Parameter((values,), ZEROS)} if self.gate_up.bias is not None else {}
        return {
            **bias,
            "inputs.weight": Parameter(((keys, keys, values, heads), "embed"), inits.weight),
            **convolution_entries((keys, keys, values), self.conv.spec.width),
            "decay_down.weight": Parameter(("decay_latent", "embed"), inits.weight),
            "decay_up.weight": Parameter((keys, "decay_latent"), inits.weight),
            **decay_entries(heads, A_LOG, TIME_STEPS, (keys,)),
            "gate_down.weight": Parameter(("gate_latent", "embed"), inits.weight),
            "gate_up.weight": Parameter((values, "gate_latent"), inits.weight),
            "norm": norm_entry(),
            "out.weight": Parameter(("embed", values), inits.residual),
        }

    def plan_work(self) -> Step:
        """The projections around the convolution and the scan."""
        of_scan = ("inputs", "conv"), ("decay_down", "decay_up", "A_log", "dt_bias")
        return (Branches((*of_scan, ("gate_down", "gate_up"))), "scan", "norm", "out")

    def mixed(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        values = self.out.weight.shape[1]  # this rank's, from its shard of the weights
        heads = values // self.value_width
        keys = heads * self.key_width
        qkv, b = self.inputs(x).split((2 * keys + values, heads), dim=-1)
        q, k, v = self.conv(qkv, document_lengths).split((keys, keys, values), dim=-1)
        q, k = (unit_length(part.unflatten(-1, (-1, self.key_width))) for part in (q, k))
        step = time_step(self.decay_up(self.decay_down(x)), self.dt_bias).unflatten(-1, (-1, self.key_width))
        decay = log_decay(self.A_log[:, None], step)  # [B, S, H, K]
        write = b.to(q.dtype).sigmoid() * (2 if self.negative_eigenvalues else 1)
        v = v.unflatten(-1, (-1, self.value_width))
        y = self.scan(q, k, v, decay, write, document_lengths)  # [B, S, H, V]
        z = self.gate_up(self.gate_down(x)).unflatten(-1, (-1, self.value_width))
        out: Tensor = self.out(gated_rms_norm(y, z, self.norm, self.eps, "norm, sigmoid").flatten(-2))
        return out
