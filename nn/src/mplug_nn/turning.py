"""Rotary positions and QK-norm: what happens to queries and keys between the projections and the attention core.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug.tensors.operator import fake, operator
from mplug_nn.packed_heads import Preparation
from mplug_nn.rotary import Turns

Turning = float | Turns
"""How pairs turn: the base of plain rotary positions, or `Turns` at sites that need another kind."""
WIDE_NORM = "wide QK-norm"


def _rotations(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> Tensor:
    """The cosine and sine of each pair's angle at each position: positions [1 or B, S] -> [2, 1 or B, S, half].

    As the operator `rotations`, a compiler keeps the small table. Otherwise it would recompute every angle for every
    head of queries and keys, in forward and in backward.
    """
    frequencies = theta ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angles = positions[..., None].to(dtype) * frequencies
    return torch.stack((angles.cos(), angles.sin()))


rotations = operator("mplug::rotations")(_rotations)


@fake("mplug::rotations")
def _(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> Tensor:
    return torch.empty((2, *positions.shape, half), device=positions.device, dtype=dtype)


@operator("mplug::scaled_rotations")
def scaled_rotations(positions: Tensor, frequencies: list[float], factor: float, dtype: torch.dtype) -> Tensor:
    """`rotations` by the frequencies of the pairs, times a factor: positions [1 or B, S] -> [2, 1 or B, S, half]."""
    angles = positions[..., None].to(dtype) * _on(positions.device, tuple(frequencies), dtype)
    return torch.stack((angles.cos(), angles.sin())) * factor


@cache
def _on(device: torch.device, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Numbers on a device, copied once: a copy makes the CPU wait, and a CUDA graph cannot contain it."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=dtype)


@fake("mplug::scaled_rotations")
def _(positions: Tensor, frequencies: list[float], factor: float, dtype: torch.dtype) -> Tensor:
    return torch.empty((2, *positions.shape, len(frequencies)), device=positions.device, dtype=dtype)


@operator("mplug::numbers_beside")
def numbers_beside(x: Tensor, numbers: list[int]) -> Tensor:
    """Constant numbers [N] on the device of x, without a copy from the CPU after the first call: int64."""
    return _on(x.device, tuple(numbers), torch.int64).clone()


@fake("mplug::numbers_beside")
def _(x: Tensor, numbers: list[int]) -> Tensor:
    return torch.empty(len(numbers), device=x.device, dtype=torch.int64)


@operator("mplug::coordinate_rotations")
def coordinate_rotations(
    positions: Tensor, frequencies: list[float], coordinates: list[int], factor: float, dtype: torch.dtype
) -> Tensor:
    """`scaled_rotations` of positions with coordinates: positions [1 or B, S, C] -> [2, 1 or B, S, half].

    Pair i turns by the coordinate `coordinates[i]` of a position.
    """
    chosen = positions[..., _on(positions.device, tuple(coordinates), torch.int64)].to(dtype)
    angles = chosen * _on(positions.device, tuple(frequencies), dtype)
    return torch.stack((angles.cos(), angles.sin())) * factor


@fake("mplug::coordinate_rotations")
def _(positions: Tensor, frequencies: list[float], coordinates: list[int], factor: float, dtype: torch.dtype) -> Tensor:
    shape = 2, *positions.shape[:-1], len(frequencies)
    return torch.empty(shape, device=positions.device, dtype=dtype)


def rotate(x: Tensor, positions: Tensor, theta: Turning) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864); with a number, the first half of the head pairs with the second.

    x [B, S, H, K], positions [1 or B, S] -> [B, S, H, K].
    """
    return _turned(x, _shared(_cosines_and_sines, positions, x.shape[-1], theta, x.dtype), theta)


_tables: dict[Hashable, tuple[Tensor, Tensor]] | None = None
"""(positions, table) of the calls so far, inside `shared_rotations`; None outside."""


@contextmanager
def shared_rotations() -> Iterator[None]:
    """Inside, calls with the same tensor of positions share one table: all blocks of a sampling step, for example.

    A step of one token otherwise spends more kernels on tables than on attention. The tensor must not change inside.
    """
    global _tables
    _tables = {}
    try:
        yield
    finally:
        _tables = None


def _shared(make: Callable[..., Tensor], positions: Tensor, *arguments: Hashable) -> Tensor:
    """make(positions, *arguments), once for each combination of arguments inside `shared_rotations`."""
    if _tables is None or torch.compiler.is_compiling():
        return make(positions, *arguments)
    key = (make, id(positions), *arguments)
    if key not in _tables:
        _tables[key] = positions, make(positions, *arguments)
    return _tables[key][1]


def table_of_rotations(positions: Tensor, head_dim: int, theta: Turning, dtype: torch.dtype) -> Tensor:
    """The cosine and sine of each pair's angle, in a dtype: positions [1 or B, S] -> [2, 1 or B, S, pairs].

    Positions are [1 or B, S, C] if they have coordinates ('coordinate rotary'). For a supplier that turns pairs itself.
    Without 'partial rotary' among a site's needs, there are K/2 pairs.
    """
    return _shared(_table, positions, head_dim, theta, dtype)


def _table(positions: Tensor, head_dim: int, theta: Turning, dtype: torch.dtype) -> Tensor:
    if not isinstance(theta, Turns):
        of_one_token = positions.shape[1] == 1 and not torch.is_grad_enabled()
        # For one token, a kernel of its own costs more than the angles: a compiler computes them where they are used.
        make = _rotations if torch.compiler.is_compiling() and of_one_token else rotations
        return make(positions, head_dim // 2, theta, dtype)
    table: Tensor
    frequencies = list(theta.frequencies)
    if theta.coordinates and positions.dim() == 3:
        table = coordinate_rotations(positions, frequencies, list(theta.coordinates), theta.factor, dtype)
    else:
        table = scaled_rotations(positions, frequencies, theta.factor, dtype)
    return table


def _cosines_and_sines(positions: Tensor, head_dim: int, theta: Turning, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return _table(positions, head_dim, theta, wide)[..., None, :].to(dtype)  # [2, 1 or B, S, 1, K/2]


def _turned(x: Tensor, cosines_and_sines: Tensor, theta: Turning) -> Tensor:
    cos, sin = cosines_and_sines
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        turning, still = x.split((width, x.shape[-1] - width), dim=-1)
        return torch.cat((_turned(turning, cosines_and_sines, theta), still), dim=-1)
    if isinstance(theta, Turns) and theta.interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)  # the backward of two slices would pad each half and add
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def prepare_qk(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    theta: Turning | None,
) -> tuple[Tensor, Tensor]:
    """QK-norm if there are weights, then RoPE unless `theta` is None: the default of the slot `Attention.prepare_qk`.

    q [B, S, H, K], k [B, S, G, K], weights [K] -> q and k of the same shapes. QK-norm is an RMSNorm over the head
    dimension (arXiv 2010.04245). Sites of another kind of rotary positions need it by name ('scaled rotary', 'partial
    rotary', 'interleaved rotary', 'coordinate rotary'); there, `theta` is a `mplug_nn.rotary.Turns`. At sites that need
    'wide QK-norm', the weights are wider than q and k, and the norm is computed in their dtype.
    """
    if q_weight is not None and k_weight is not None:
        q, k = _normalised(q, q_weight, eps), _normalised(k, k_weight, eps)
    if theta is not None:
        turns = _shared(_cosines_and_sines, positions, q.shape[-1], theta, q.dtype)
        q, k = _turned(q, turns, theta), _turned(k, turns, theta)
    return q, k


PASSING_QK = Preparation(prepare_qk, passes_through=True)


def prepare_qkv(
    heads: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    theta: Turning | None,
    prepare_qk: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection into queries, keys and values: the default of the slot `Attention.prepare_qkv`.

    heads [B, S, H + 2G, K], queries first and values last -> q [B, S, H, K], k and v [B, S, G, K]. `prepare_qk` is the
    callable in the narrower slot `Attention.prepare_qk`; it takes the remaining arguments. A supplier that fuses its
    work does not call it. v is the values' part of `heads`, as a view if possible.

    If there are neither weights nor `theta` and the core attends from packed heads, `mplug_nn.Attention` omits the call
    of a supplier that states `passes_through` (`mplug_nn.Preparation`). It calls any other supplier.
    """
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    q, k = prepare_qk(q, k, positions, q_weight, k_weight, eps, theta)
    return q, k, v


PASSING_QKV = Preparation(prepare_qkv, passes_through=True)
