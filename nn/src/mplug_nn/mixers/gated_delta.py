"""Gated delta nets (arXiv 2412.06464), as Qwen3-Next has them.

B batch, S sequence, D embed, G key heads, H value heads, K key width, V value width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ONES, Entries, Inits
from mplug.layout.plan import Init, Parameter, Segment
from mplug.layout.work import Step
from mplug_nn.linear import Linear
from mplug_nn.mixers.convolution import Convolution
from mplug_nn.mixers.gated_norm import gated_rms_norm, unit_length
from mplug_nn.mixers.mixer import Mixer, convolution_entries, decay_entries, log_decay, norm_entry, time_step
from mplug_nn.mixers.scan import Scan


class GatedDeltaNet(Mixer):
    """A scan with the delta rule and one decay per value head.

    `inputs` projects x to q, k (key heads), v, z (value heads), b and a (a number per value head). q, k and v pass a
    short convolution with SiLU; then q and k have length 1. The decay is exp(-exp(A_log) softplus(a + dt_bias)), the
    write strength sigmoid(b), doubled if `negative_eigenvalues`. The output is norm(y) silu(z) per value head.

    A key head serves consecutive value heads. Tensor parallelism divides heads; key heads have copies where there are
    fewer of them than ranks.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_width: int,
        value_width: int,
        *,
        conv_width: int = 4,
        eps: float = 1e-6,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_width, self.value_width, self.eps = key_width, value_width, eps
        self.negative_eigenvalues = negative_eigenvalues
        keys, values = num_key_heads * key_width, num_value_heads * value_width
        self.inputs = Linear(dim, 2 * (keys + values + num_value_heads), bias=False)
        self.conv = Convolution(2 * keys + values, conv_width)
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.scan = Scan("delta", num_value_heads, num_key_heads, key_width, value_width, key_width**-0.5)
        self.norm = nn.Parameter(torch.empty(value_width))
        self.out = Linear(values, dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        keys = Segment("kv_heads", self.num_key_heads, self.key_width, uneven="copy")
        values = Segment("heads", self.num_value_heads, self.value_width)
        heads = Segment("heads", self.num_value_heads)
        return {
            "inputs.weight": Parameter(((keys, keys, values, values, heads, heads), "embed"), inits.weight),
            **convolution_entries((keys, keys, values), self.conv.spec.width),
            **decay_entries(heads, Init("log of uniform", low=0.01, high=16.0), ONES),
            "norm": norm_entry(),
            "out.weight": Parameter(("embed", values), inits.residual),
        }

    def plan_work(self) -> Step:
        """The projections around the convolution and the scan."""
        return ("inputs", "conv", "A_log", "dt_bias", "scan", "norm", "out")

    def input_linear(self) -> Linear:
        """The layer that alone reads x in `forward`."""
        return self.inputs

    def mixed(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        values = self.out.weight.shape[1]  # this rank's, from its shard of the weights
        heads = values // self.value_width
        projected = self.inputs(x)
        keys = (projected.shape[-1] - 2 * (values + heads)) // 2
        qkv, z, b, a = projected.split((2 * keys + values, values, heads, heads), dim=-1)
        q, k, v = self.conv(qkv, document_lengths).split((keys, keys, values), dim=-1)
        q, k = (unit_length(part.unflatten(-1, (-1, self.key_width))) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, self.value_width)) for part in (v, z))
        write = b.to(q.dtype).sigmoid() * (2 if self.negative_eigenvalues else 1)
        decay = log_decay(self.A_log, time_step(a, self.dt_bias))
        y = self.scan(q, k, v, decay, write, document_lengths)  # [B, S, H, V]
        out: Tensor = self.out(gated_rms_norm(y, z, self.norm, self.eps, "norm, silu").flatten(-2))
        return out
