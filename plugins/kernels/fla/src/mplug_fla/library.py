"""The forward and backward passes of flash-linear-attention's chunked scans, with one signature for all kinds.

B samples (1 if documents are concatenated), T rows, G key heads, H value heads, K key width, V value width, N samples
or documents, C rows of a chunk. The library keeps sums of log decays in base 2.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug_nn.mixers.specification import CHANNEL_DECAY, CHANNEL_DELTA, DECAY, DELTA

CHUNK = 64
MODULES = (
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gla.chunk",
    "fla.ops.kda.chunk",
    "fla.ops.simple_gla.chunk",
    "fla.modules.causal_conv1d",
)
SHARED_KEYS = (DELTA, CHANNEL_DELTA)
"""The kinds whose kernels know key heads that serve several value heads."""


class Call(NamedTuple):
    """The arguments of a pass: q and k [B, T, G, K], v [B, T, H, V], and per head or channel the decay, all contiguous.

    `state` [N, H, K, V] in fp32 and `begins` [N + 1] may be None, and `write` [B, T, H] is None without the delta rule.
    """

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor | None
    scale: float
    state: Tensor | None
    begins: Tensor | None

    @property
    def shared(self) -> dict[str, Any]:
        """The arguments that all passes of the library have."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "scale": self.scale,
            "initial_state": self.state,
            "cu_seqlens": self.begins,
            "chunk_size": chunk_of(self.kind, self.q.shape[1]),
            "chunk_indices": None if self.begins is None else _indices(self),
        }


class Passed(NamedTuple):
    """What the forward pass returns: output [B, T, H, V], end states [N, H, K, V] or None, and what it saves.

    `sums` are the sums of decays inside chunks, of the decays' shape in fp32; `scores` and `solved` [B, T, H, C] are
    products of a chunk, if the kind has them.
    """

    y: Tensor
    end: Tensor | None
    sums: Tensor
    scores: Tensor | None = None
    solved: Tensor | None = None


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Of q, k, v, decay, write and state."""


def load() -> None:
    """Import the library's modules: an error comes here and not in the first step of a run."""
    for name in MODULES:
        import_module(name)


def chunk_of(kind: str, length: int) -> int:
    """C: 64, or for 'channel decay' the next power of two of the length, at least 16, if it is smaller."""
    if kind != CHANNEL_DECAY:
        return CHUNK
    return min(CHUNK, max(16, 1 << (length - 1).bit_length()))


def _indices(call: Call) -> Tensor:
    from fla.ops.utils.index import prepare_chunk_indices

    indices: Tensor = prepare_chunk_indices(call.begins, chunk_of(call.kind, call.q.shape[1]))
    return indices


def forward(call: Call, decay: Tensor, needs_end: bool) -> Passed:
    """The scan of `call` with log decays in fp32; end states only if asked."""
    with torch.cuda.device(call.q.device):
        return FORWARD[call.kind](call, decay, needs_end)


def backward(call: Call, passed: Passed, gradient: Tensor, end_gradient: Tensor | None) -> Gradients:
    """The gradients of a scan, given those of its output [B, T, H, V] and of its end states."""
    with torch.cuda.device(call.q.device):
        return BACKWARD[call.kind](call, passed, gradient, end_gradient)


def _delta(call: Call, decay: Tensor, needs_end: bool) -> Passed:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    sums, y, solved, end, *_ = chunk_gated_delta_rule_fwd(
        **call.shared, g=decay, beta=call.write, output_final_state=needs_end
    )
    return Passed(y, end, sums, solved=solved)


def _delta_backward(call: Call, passed: Passed, gradient: Tensor, end_gradient: Tensor | None) -> Gradients:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    dq, dk, dv, dwrite, ddecay, dstate, *_ = chunk_gated_delta_rule_bwd(
        **call.shared, g=passed.sums, beta=call.write, A=passed.solved, do=gradient, dht=end_gradient
    )
    return dq, dk, dv, ddecay, dwrite, dstate


def _channel_delta(call: Call, decay: Tensor, needs_end: bool) -> Passed:
    from fla.ops.kda.chunk import chunk_kda_fwd

    y, end, sums, scores, solved, *_ = chunk_kda_fwd(
        **call.shared, g=decay, beta=call.write, output_final_state=needs_end
    )
    return Passed(y, end, sums, scores, solved)


def _channel_delta_backward(call: Call, passed: Passed, gradient: Tensor, end_gradient: Tensor | None) -> Gradients:
    from fla.ops.kda.chunk import chunk_kda_bwd

    dq, dk, dv, dwrite, ddecay, dstate, *_ = chunk_kda_bwd(
        **call.shared,
        g=passed.sums,
        beta=call.write,
        Aqk=passed.scores,
        Akk=passed.solved,
        do=gradient,
        dht=end_gradient,
    )
    return dq, dk, dv, ddecay, dwrite, dstate


def _decay(call: Call, decay: Tensor, needs_end: bool) -> Passed:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    sums = chunk_local_cumsum(decay, scale=RCP_LN2, **_stretch(call))
    y, end = chunk_simple_gla_fwd(**call.shared, g=sums, output_final_state=needs_end)
    return Passed(y, end, sums)


def _decay_backward(call: Call, passed: Passed, gradient: Tensor, end_gradient: Tensor | None) -> Gradients:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
    from fla.ops.utils import chunk_local_cumsum

    dq, dk, dv, dsums, dstate = chunk_simple_gla_bwd(
        **call.shared, g=passed.sums, g_gamma=None, do=gradient, dht=end_gradient
    )
    return dq, dk, dv, chunk_local_cumsum(dsums, reverse=True, **_stretch(call)), None, dstate


def _channel_decay(call: Call, decay: Tensor, needs_end: bool) -> Passed:
    from fla.ops.gla.chunk import chunk_gla_fwd

    sums, scores, _, end, y = chunk_gla_fwd(**call.shared, g=decay, g_cumsum=None, output_final_state=needs_end)
    return Passed(y, end, sums, scores)


def _channel_decay_backward(call: Call, passed: Passed, gradient: Tensor, end_gradient: Tensor | None) -> Gradients:
    from fla.ops.gla.chunk import chunk_gla_bwd

    dq, dk, dv, ddecay, dstate = chunk_gla_bwd(
        **call.shared, g=None, g_cumsum=passed.sums, h=None, A=passed.scores, do=gradient, dht=end_gradient
    )
    return dq, dk, dv, ddecay, None, dstate


def _stretch(call: Call) -> dict[str, Any]:
    return {name: call.shared[name] for name in ("chunk_size", "cu_seqlens", "chunk_indices")}


FORWARD = {DECAY: _decay, CHANNEL_DECAY: _channel_decay, DELTA: _delta, CHANNEL_DELTA: _channel_delta}
BACKWARD = {
    DECAY: _decay_backward,
    CHANNEL_DECAY: _channel_decay_backward,
    DELTA: _delta_backward,
    CHANNEL_DELTA: _channel_delta_backward,
}
