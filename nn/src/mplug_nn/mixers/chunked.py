"""Scans in chunks: products of matrices inside a chunk, and a state that passes from chunk to chunk.

B batch, S sequence, N chunks, C positions of a chunk, G key heads, H value heads, K key width, V value width. Per
chunk, with start state S and D the sum of the log decays from the start of the chunk to a position, inclusive:

    P_ij = exp(D_i - D_j) for j <= i, else 0                          (masked before exp: the other half overflows)
    y    = (q exp(D)) S + ((q kᵀ) ∘ P) u
    S   <- exp(D_C) S + (k exp(D_C - D))ᵀ u

u are the values, or for the delta rule the solution of (I + L) u = b (v - (k exp(D)) S), where L is the strictly lower
part of b (k kᵀ) ∘ P (arXiv 2412.06464, section 3.3).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug.tensors.segments import numbered
from mplug_nn.mixers.specification import NOTHING, MixerInputs, ScanSpec

CHUNK = 64
CHANNEL_CHUNK = 16
"""Positions of a chunk if channels have decays of their own: P then has C² K elements per chunk, C K per position."""


def chunked_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor | None,
    spec: ScanSpec,
    inputs: MixerInputs = NOTHING,
) -> tuple[Tensor, Tensor]:
    """A scan as `spec` describes it: the default of the slot `Scan.core`.

    q and k [B, S, G, K] with G dividing H, v [B, S, H, V], log decay [B, S, H] (by channel: [B, S, H, K]), write
    strength [B, S, H] for the delta rule, else None -> (y [B, S, H, V] in the dtype of v, end state [B, H, K, V] in at
    least fp32). Key head g belongs to the value heads g H/G to (g + 1) H/G - 1. `mplug_nn.ScanSpec` lists what a site
    can require. All is computed in at least fp32.

    The end state is the state after the last position. A supplier that does not offer 'states' may return None for it.
    Scan.core is linear in (v, start state). Strategies that divide the sequence rely on it.
    """
    length, heads = v.shape[1], v.shape[2]
    chunk = min(CHANNEL_CHUNK if spec.by_channel else CHUNK, length)
    wide = torch.promote_types(v.dtype, torch.float32)
    sharers = heads // k.shape[2]
    q, k = (x.to(wide).repeat_interleave(sharers, dim=2) for x in (q, k))
    q, k, v_, g = (_in_chunks(x.to(wide), chunk) for x in (q * spec.scale, k, v, decay))
    masks = _masks(inputs.document_lengths, length, chunk, v.device)
    parts = _parts(q, k, g, masks, spec.by_channel)
    if write is None:
        carried, values = None, v_
    else:
        values, carried = _corrected(parts, k, v_, _in_chunks(write.to(wide), chunk))
    start = inputs.state
    state = v_.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1]) if start is None else start.to(wide)
    states, written = [], []
    for number in range(values.shape[2]):
        u = values[:, :, number]
        if carried is not None:
            u = u - carried[:, :, number] @ state
        states.append(state)
        written.append(u)
        state = parts.kept[:, :, number] * state + parts.leaving[:, :, number].transpose(-1, -2) @ u
    y = parts.asking @ torch.stack(states, dim=2) + parts.scores @ torch.stack(written, dim=2)  # [B, H, N, C, V]
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2).to(v.dtype), state


class _Masks(NamedTuple):
    """Which positions of a chunk belong together; 1 in front where samples are not packed."""

    seen: Tensor
    """[1 or B, 1, N or 1, C, C]: j <= i, in the same document."""
    from_start: Tensor | None
    """[B, 1, N, C]: the position is in the document of the position before the chunk. None: all are."""
    to_end: Tensor | None
    """[B, 1, N, C]: the position is in the document of the chunk's last position. None: all are."""


class _Parts(NamedTuple):
    """What a chunk computes from queries, keys and decays."""

    scores: Tensor
    """(q kᵀ) ∘ P [B, H, N, C, C]."""
    overlaps: Tensor
    """(k kᵀ) ∘ P [B, H, N, C, C], whose diagonal and upper half are not used."""
    asking: Tensor
    """q exp(D) [B, H, N, C, K]."""
    entering: Tensor
    """The factor exp(D) of keys [B, H, N, C, 1 or K]."""
    leaving: Tensor
    """k exp(D_C - D) [B, H, N, C, K]."""
    kept: Tensor
    """exp(D_C) [B, H, N, 1 or K, 1]."""


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, S, H, ...] -> [B, H, N, C, ...], with zeros behind the last position: they leave a state as it is."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % chunk
    if missing:
        x = pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    chunks: Tensor = x.unflatten(2, (-1, chunk))
    return chunks


def _masks(lengths: Tensor | None, length: int, chunk: int, device: torch.device) -> _Masks:
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
    if lengths is None:
        return _Masks(lower[None, None, None], None, None)
    numbers = numbered(lengths, length)  # [B, S]
    before = torch.cat((numbers[:, :1], numbers[:, chunk - 1 : -1 : chunk]), dim=1)  # [B, N]
    behind = numbers[:, -1:].expand(-1, -length % chunk)  # what pads the last chunk leaves its state as it is
    numbers = torch.cat((numbers, behind), dim=1).unflatten(1, (-1, chunk))  # [B, N, C]
    same = numbers[..., :, None] == numbers[..., None, :]
    from_start = numbers == before[..., None]
    return _Masks((same & lower)[:, None], from_start[:, None], (numbers == numbers[..., -1:])[:, None])


def _parts(q: Tensor, k: Tensor, g: Tensor, masks: _Masks, by_channel: bool) -> _Parts:
    sums = _running_sums(g)  # D: [B, H, N, C] or [B, H, N, C, K]
    if not by_channel:
        sums = sums[..., None]
    between = sums[:, :, :, :, None] - sums[:, :, :, None]  # [B, H, N, C, C, 1 or K]
    factors = between.masked_fill(~masks.seen[..., None], float("-inf")).exp()
    if by_channel:
        decayed = factors * k[:, :, :, None]  # [B, H, N, C, C, K]
        scores, overlaps = ((x[:, :, :, :, None] * decayed).sum(dim=-1) for x in (q, k))
    else:
        scores, overlaps = (x @ k.transpose(-1, -2) * factors[..., 0] for x in (q, k))
    last = sums[:, :, :, -1:]
    entering, leaving, kept = sums, last - sums, last
    if masks.from_start is not None and masks.to_end is not None:
        entering = entering.masked_fill(~masks.from_start[..., None], float("-inf"))
        leaving = leaving.masked_fill(~masks.to_end[..., None], float("-inf"))
        kept = kept.masked_fill(~masks.from_start[..., -1:, None], float("-inf"))
    entering = entering.exp()
    return _Parts(scores, overlaps, q * entering, entering, k * leaving.exp(), kept.exp().transpose(-1, -2))


def _running_sums(x: Tensor) -> Tensor:
    """x.cumsum(dim=3) by doubling: on GPUs, torch's own adds in an order that is not fixed (trainer.deterministic)."""
    distance, length = 1, x.shape[3]
    while distance < length:
        x = x + pad(x[:, :, :, : length - distance], (0, 0) * (x.dim() - 4) + (distance, 0))
        distance *= 2
    return x


def _corrected(parts: _Parts, k: Tensor, v: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """(u of a start state of zeros [B, H, N, C, V], the factor of the start state in what is subtracted from it)."""
    wanted = torch.cat((v, k * parts.entering), dim=-1) * write[..., None]
    strict = (parts.overlaps * write[..., None]).tril(-1)
    solved = torch.linalg.solve_triangular(strict, wanted, upper=False, unitriangular=True)
    values, carried = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return values, carried
