"""Scans position by position, as their papers write them: slow, and short enough to be compared with a formula."""

import torch
from torch import Tensor

from mplug.tensors.segments import numbered
from mplug_nn.mixers.specification import NOTHING, MixerInputs, ScanSpec


def recurrent_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor | None,
    spec: ScanSpec,
    inputs: MixerInputs = NOTHING,
) -> tuple[Tensor, Tensor]:
    """The scan of the slot `Scan.core`, with its arguments and results, in a loop over the positions."""
    wide = torch.promote_types(v.dtype, torch.float32)
    sharers = v.shape[2] // k.shape[2]
    q, k = (x.to(wide).repeat_interleave(sharers, dim=2) for x in (q, k))
    factors = decay.to(wide).exp() if spec.by_channel else decay.to(wide).exp()[..., None]  # [B, S, H, K or 1]
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=wide)
    state = state if inputs.state is None else inputs.state.to(wide)
    numbers = None if inputs.document_lengths is None else numbered(inputs.document_lengths, v.shape[1])
    rows = []
    for place in range(v.shape[1]):
        if numbers is not None and place:
            continues = numbers[:, place] == numbers[:, place - 1]
            state = torch.where(continues[:, None, None, None], state, 0.0)
        state = factors[:, place, :, :, None] * state
        value = v[:, place].to(wide)
        if write is not None:
            found = torch.einsum("bhkv,bhk->bhv", state, k[:, place])
            value = write[:, place, :, None].to(wide) * (value - found)
        state = state + k[:, place, :, :, None] * value[:, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, place]) * spec.scale)
    return torch.stack(rows, dim=1).to(v.dtype), state
