"""cuDNN's fused attention through Transformer Engine, as torch operators. No other backend is ever chosen.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, V value width, M documents of a sample. For packed
samples, the kernel receives the tokens of all samples concatenated, [B S, H, K], and the start of each document.

Trap: Transformer Engine's own modules choose flash-attn if it is importable. Beside flash-attn 4, they then compute
another mask than the one asked for.
"""

from functools import cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from mplug_nn import fake, operator
from mplug_nn.parts import Part
from mplug_te.library import library

BACKEND = "F16_arbitrary_seqlen"
"""Transformer Engine's name of cuDNN's attention in half precision."""

# torch reads an operator's schema from its annotated arguments, so operators list them one by one.


class Mask(NamedTuple):
    """Which keys a query sees. `window` is the number of visible positions, 0 if all are."""

    causal: bool
    window: int
    longer_keys: bool
    documents: bool
    sinks: bool

    @property
    def word(self) -> str:
        """Transformer Engine's word."""
        if not self.causal:
            return "padding" if self.documents else "no_mask"
        return f"{'padding_' if self.documents else ''}causal{'_bottom_right' if self.longer_keys else ''}"

    @property
    def span(self) -> tuple[int, int]:
        """How many positions to the left and to the right a query sees; -1: all."""
        reach = self.window - 1 if self.window else -1
        return reach, 0 if self.causal else reach

    @property
    def layout(self) -> str:
        """Transformer Engine's word for the arrangement of queries, keys and values."""
        return "thd_thd_thd" if self.documents else "bshd_bshd_bshd"

    def options(self) -> dict[str, Any]:
        """The arguments that forward and backward share."""
        form = self.layout.partition("_")[0]
        return {
            "qkv_layout": self.layout,
            "o_format": form,
            "attn_mask_type": self.word,
            "softmax_type": "learnable" if self.sinks else "vanilla",
            "window_size": self.span,
            "bottom_right_diagonal": self.longer_keys,
            "cuda_graph": torch.cuda.is_current_stream_capturing(),
        }


@operator("mplug_te::attend")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
    window: int,
    longer_keys: bool,
    lengths: Optional[Tensor],  # noqa: UP045 (torch reads it)
    sinks: Optional[Tensor],  # noqa: UP045 (torch reads it)
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, K], k [B, T, G, K], v [B, T, G, V] -> (output [B, S, H, V], log-sum-exp, state of dropout [2]).

    The log-sum-exp is [B, H, S, 1], of packed samples [B S, H, 1], in fp32.
    """
    mask = Mask(causal, window, longer_keys, lengths is not None, sinks is not None)
    output, (sums, state, *_) = library().extensions.fused_attn_fwd(
        True,
        q.shape[1],
        k.shape[1],
        *_starts(q, k, lengths),
        *_arranged(mask, q, k, v),
        q.dtype,
        library().enums.FusedAttnBackend[BACKEND],
        attn_scale=scale,
        dropout=dropout,
        rng_gen=None if dropout else _unused_generator(q.device),
        softmax_offset=_offset(sinks),
        **_padded(q, k, lengths),
        **mask.options(),
    )
    return output.view(*q.shape[:3], v.shape[3]), sums, state


@fake("mplug_te::attend")
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, s, h, _ = q.shape
    lengths = others[5]
    sums = q.new_empty((b, h, s, 1) if lengths is None else (b * s, h, 1), dtype=torch.float32)
    return q.new_empty((b, s, h, v.shape[3])), sums, q.new_empty(2, dtype=torch.int64)


@operator("mplug_te::differentiate")
def differentiate(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    state: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
    window: int,
    longer_keys: bool,
    deterministic: bool,
    lengths: Optional[Tensor],  # noqa: UP045 (torch reads it)
    sinks: Optional[Tensor],  # noqa: UP045 (torch reads it)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of the output -> the gradients of q, k, v and of the sinks (without sinks: [0])."""
    mask = Mask(causal, window, longer_keys, lengths is not None, sinks is not None)
    options, form = mask.options(), mask.layout.partition("_")[0]
    dq, dk, dv, *others = library().extensions.fused_attn_bwd(
        q.shape[1],
        k.shape[1],
        *_starts(q, k, lengths),
        *_arranged(mask, q, k, v, output, gradient),
        q.dtype,
        [sums.contiguous(), state, *([] if sinks is None else [_offset(sinks)])],
        library().enums.FusedAttnBackend[BACKEND],
        attn_scale=scale,
        dropout=dropout,
        do_format=form,
        dqkv_layout=mask.layout,
        deterministic=deterministic,
        **_padded(q, k, lengths),
        **options,
    )
    of_sinks = q.new_empty(0) if sinks is None else others[1].view(-1).to(sinks.dtype)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), of_sinks


@fake("mplug_te::differentiate")
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = others[-1]
    of_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def attend_part(part: Part) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, V], log-sum-exp [B, H, S]) of a part without segments."""
    output, sums, _ = attend(part.q, part.k, part.v, part.scale, 0.0, part.causal, 0, False, None, None)
    return output, sums.squeeze(3)


def differentiate_part(
    part: Part, gradient: Tensor, output: Tensor, sums: Tensor, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a part, given the output and the log-sum-exp [B, H, S] over all parts."""
    state = torch.zeros(2, dtype=torch.int64, device=part.q.device)  # of dropout's generator; unused
    saved = output, sums[..., None], state
    how = part.scale, 0.0, part.causal, 0, False, deterministic
    dq, dk, dv, _ = differentiate(gradient, part.q, part.k, part.v, *saved, *how, None, None)
    return dq, dk, dv


def _arranged(mask: Mask, *xs: Tensor) -> list[Tensor]:
    """[B, S, H, K] as the layout names it, contiguous."""
    return [x.contiguous().flatten(0, 1) if mask.documents else x.contiguous() for x in xs]


def _starts(q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The starts of samples or documents among all queries and among all keys, and the end of the last; int32."""
    if lengths is not None:
        starts = torch.nn.functional.pad(lengths.flatten().cumsum(dim=0), (1, 0)).to(torch.int32)
        return starts, starts
    of_queries, of_keys = (
        torch.arange(0, (len(x) + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
    )
    return of_queries, of_keys


def _padded(q: Tensor, k: Tensor, lengths: Tensor | None) -> dict[str, Tensor]:
    """The starts of documents in memory: documents are consecutive."""
    if lengths is None:
        return {}
    starts, _ = _starts(q, k, lengths)
    return {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}


def _unused_generator(device: torch.device) -> torch.Generator | None:
    """A generator for calls without dropout: Transformer Engine advances the default generator in every call.

    A graph that is captured knows only the default generator.
    """
    return None if torch.cuda.is_current_stream_capturing() else _generator(device)


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _offset(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.detach().float().contiguous().view(1, -1, 1, 1)
