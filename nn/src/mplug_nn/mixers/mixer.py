"""What the mixers with a scan have in common. B batch, S sequence, D embed, H value heads, M documents."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ONES, TOKENS, ZEROS, Entries
from mplug.layout.plan import Init, Parameter, Segment

A_LOG = Init("log of uniform", low=1.0, high=16.0)
"""The logarithm of a rate of decay between 1 and 16 (Mamba-2, KDA)."""
TIME_STEPS = Init("time step", low=1e-3, high=0.1)
"""A bias before a softplus whose result is between 0.001 and 0.1, uniform in its logarithm (Mamba-2, KDA)."""
OF_HEADS = (*TOKENS, "heads")
"""The activation axes that a weight is broadcast over which all heads share."""


class Mixer(nn.Module):
    """The base of token mixers that stand in the place of attention in a block (`mplug_nn.Block`).

    They are called as `mixer(x [B, S, D], positions, keys, document_lengths)` and return [B, S, D]. Positions enter by
    the order of the rows alone, and nothing is drawn.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # in the submodules with a scan and a convolution

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], lengths [B, M] if samples are packed -> [B, S, D]."""
        return self.mixed(x, document_lengths)

    def mixed(self, x: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        raise NotImplementedError


def decay_entries(heads: Segment, a_log: Init, bias: Init, bias_dims: tuple[Segment, ...] = ()) -> Entries:
    """The parameters `A_log` and `dt_bias` of a decay; weight decay, which would change its range, does not apply."""
    return {
        "A_log": Parameter((heads,), a_log, decay=False),
        "dt_bias": Parameter(bias_dims or (heads,), bias, decay=False),
    }


def convolution_entries(channels: tuple[Segment, ...], width: int, *, bias: bool = False) -> Entries:
    """The parameters of the submodule `conv`, whose channels are these segments.

    They start as those of torch's convolutions do: uniform within 1 / sqrt(width) (Mamba-2, Megatron-LM).
    """
    bound = width**-0.5
    entries = {"conv.weight": Parameter((channels, "conv"), Init("uniform", low=-bound, high=bound))}
    return entries | ({"conv.bias": Parameter((channels,), ZEROS)} if bias else {})


def norm_entry() -> Parameter:
    """The weight of a gated norm that all heads share."""
    return Parameter(("head_dim",), ONES, over=OF_HEADS)


def log_decay(a_log: Tensor, step: Tensor) -> Tensor:
    """-exp(A_log) step, in at least fp32."""
    wide = torch.promote_types(step.dtype, torch.float32)
    decay: Tensor = -a_log.to(wide).exp() * step.to(wide)
    return decay


def time_step(x: Tensor, bias: Tensor) -> Tensor:
    """softplus(x + bias), in at least fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return nn.functional.softplus(x.to(wide) + bias.to(wide))
