"""Attention by cuDNN through Transformer Engine: the supplier of `Attention.core`, and its limits.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, V value width, M documents of a sample.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mplug import Site
from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec, scaled_dot_product
from mplug_nn.parts import PLAIN_PARTS, AttentionParts, Part
from mplug_nn.specification import DOCUMENTS, FULL, KEY_LENGTH, LOG_SUM_EXP, SINKS, VALUE_WIDTH, WINDOW
from mplug_te.fused import BACKEND, Mask, attend, attend_part, differentiate, differentiate_part
from mplug_te.library import library, number_of
from mplug_te.limits import runs

if TYPE_CHECKING:
    from mplug import Run

OFFERED = frozenset({DOCUMENTS, FULL, KEY_LENGTH, SINKS, VALUE_WIDTH, WINDOW})
SERVED = OFFERED | {LOG_SUM_EXP}
"""Needs that it serves beyond the plain case, as far as cuDNN does."""
FIRST_SOUND_CUDNN = 91501
"""Older versions give wrong results if 128 does not divide the sequence length (pytorch #169849)."""
LARGEST_DETERMINISTIC = 1 << 30
"""B H S T above which cuDNN's deterministic backward of packed samples takes 128 GiB of workspace on Hopper."""


class _Attention(torch.autograd.Function):
    """q [B, S, H, K], k [B, T, G, K], v [B, T, G, V], sinks [H] or None -> [B, S, H, V]; backward: their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, lengths, deterministic, how):  # type: ignore[no-untyped-def]
        output, sums, state = attend(q, k, v, *how, lengths, sinks)
        ctx.save_for_backward(q, k, v, output, sums, state, lengths, sinks)
        ctx.how, ctx.deterministic = how, deterministic
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        *saved, lengths, sinks = ctx.saved_tensors
        dq, dk, dv, of_sinks = differentiate(gradient, *saved, *ctx.how, ctx.deterministic, lengths, sinks)
        return dq, dk, dv, None if sinks is None else of_sinks, None, None, None


@cache
def core(deterministic: bool) -> Callable[..., Tensor]:
    """The supplier; with `deterministic`, its backward is bitwise reproducible."""

    def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """Attention: q [B, S, H, K], k [B, T, G, K] and v [B, T, G, V] -> [B, S, H, V].

        Dropout draws from torch's own generator, not from `inputs`.
        """
        if k.shape[1] == 1:  # cuDNN rejects a single key, as a sample's first token has
            return scaled_dot_product(q, k, v, spec, inputs)
        how = spec.scale, spec.dropout, spec.causal, spec.window or 0, k.shape[1] != q.shape[1]
        output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            q, k, v, inputs.sinks, inputs.document_lengths, deterministic, how
        )
        return output

    return AttentionCore(attention, parts=CudnnParts(deterministic))


class CudnnParts(AttentionParts):
    """Attention by parts, without segments; with `deterministic`, its backward is bitwise reproducible."""

    def __init__(self, deterministic: bool) -> None:
        self.deterministic, self.name = deterministic, f"te_cudnn{'_deterministic' if deterministic else ''}"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        return PLAIN_PARTS.attend(part) if part.k.shape[1] == 1 else attend_part(part)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        if part.k.shape[1] == 1:
            return PLAIN_PARTS.differentiate(part, grad, output, log_sum_exp)
        return differentiate_part(part, grad, output, log_sum_exp, self.deterministic)


# Limits.


def supports(site: Site, run: "Run") -> bool | str:
    """True if Transformer Engine and cuDNN can compute the site's attention on this machine; else the reason."""
    if DOCUMENTS in site.needs and (reason := site.lacking(OFFERED)):
        return reason  # parts with segments are not offered
    if {DOCUMENTS, KEY_LENGTH} <= site.needs:
        return "it supports documents only if there are as many keys as queries, and this site needs 'key length'"
    return runs(run) or _refused_by_cudnn(site, run) or True


def _refused_by_cudnn(site: Site, run: "Run") -> str:
    module, trainer = site.module, run.config.trainer
    spec: AttentionSpec = module.spec
    mask = Mask(spec.causal, spec.window or 0, spec.own_key_length, DOCUMENTS in site.needs, spec.sinks)
    length, uneven = trainer.seq_length, trainer.seq_length % 128 != 0 or LOG_SUM_EXP in site.needs
    version = library().tex.get_cudnn_version()
    if version < FIRST_SOUND_CUDNN and uneven:
        return f"it needs cuDNN 9.15.1 or newer if 128 does not divide the sequence length, and {version} is installed"
    if spec.dropout * 16 % 1:
        return f"cuDNN supports dropout in steps of 1/16, and attention dropout is {spec.dropout:g}"
    if trainer.deterministic:
        if spec.sinks:
            return "cuDNN has no deterministic backward of attention sinks, and trainer.deterministic is set"
        size = trainer.micro_batch_size * module.num_heads * length**2
        if mask.documents and size >= LARGEST_DETERMINISTIC:
            return (
                "cuDNN's deterministic backward of packed samples needs too much memory at this size, and "
                "trainer.deterministic is set; reduce trainer.micro_batch_size"
            )
    sizes = (module.num_heads, module.num_kv_heads, spec.key_width, spec.value_width)
    return _message(
        mask, sizes, trainer.micro_batch_size, length, spec.dropout, trainer.deterministic, run.precision.activations
    )


@cache
def _message(
    mask: Mask,
    sizes: tuple[int, int, int, int],
    batch: int,
    length: int,
    dropout: float,
    deterministic: bool,
    format_name: str,
) -> str:
    """cuDNN's reason against an attention, as Transformer Engine reports it; the empty string if there is none."""
    utils, enums, heads = library().utils, library().enums, sizes
    number = number_of(getattr(torch, format_name))
    options, form = mask.options(), enums.QKVFormat[mask.layout.partition("_")[0]]
    layout = enums.QKVLayout[mask.layout]
    left, right = mask.span
    named: dict[str, Any] = {
        "deterministic": deterministic,
        "attn_mask_type": enums.AttnMaskType[mask.word],
        "bias_type": enums.AttnBiasType["no_bias"],
        "window_size_left": left,
        "window_size_right": right,
        "bottom_right_diagonal": mask.longer_keys,
        "softmax_type": enums.SoftmaxType[options["softmax_type"]],
        "dropout": dropout,
        **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), number),
        **dict.fromkeys(("qkv_layout", "dqkv_layout"), layout),
        **dict.fromkeys(("o_format", "do_format"), form),
        "batch_size": batch,
        **dict(zip(("num_attn_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"), heads, strict=True)),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), length),
        **dict.fromkeys(("num_tokens_q", "num_tokens_kv"), batch * length if mask.documents else 0),
    }
    backend, message = library().tex.get_fused_attn_backend(utils.FusedAttentionParams(**named))
    if enums.FusedAttnBackend.cast(backend) == enums.FusedAttnBackend[BACKEND]:
        return ""
    return f"cuDNN does not compute it: {message.strip() or 'Transformer Engine gives no reason'}"


def varies(site: Site, run: "Run") -> str:
    """Why results depend on the layout: fused dropout draws its numbers in an order of its own."""
    return "its dropout mask is drawn inside the fused kernel" if site.module.dropout > 0 else ""
