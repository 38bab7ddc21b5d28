"""Fused Triton kernels: attention and its largest logits; norms with the residual addition; QKV; experts.

The backward kernel of QKV writes the gradient of the packed projection in one pass, and that of SwiGLU the gradient of
both halves. The plugin also offers a GELU in plain torch operations, which torch's compiler fuses with its neighbours.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run

HALF = ("bfloat16", "float16")
NARROWER = (*HALF, "float32")
"""Formats whose numbers the kernels compute with in fp32."""
TURNING = frozenset({"scaled rotary", "coordinate rotary"})
"""Needs that the kernel for queries and keys serves: it turns pairs by any table of cosines and sines."""
SWIGLU = "swiglu"
WIDEST_HEAD = 256
"""Maximum width of a head, in elements, whose tiles attention holds in shared memory."""
RATE, MEASURED = 220.0, 9
"""`Offer.rate` of attention with windows (benchmarks/windows.py), and the major compute capability that it is of."""
AMPERE = (8, 0)
WIDEST = 16384
"""Maximum width of a row, in elements, that a norm's program holds in registers."""
LARGEST_SEQUENCE = 65536
"""Maximum number of logits of a sequence (tokens times experts) for Sinkhorn's rounds in one program.

So many stay in the cache of a multiprocessor. More of them would come from memory in every round.
"""


class Triton:
    """Attention; norms with the residual addition; QK-norm and RoPE with the split of QKV; rows to experts; GELU."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    captures = True
    """The kernels read tensors and shapes only."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self, run: "Run") -> list[Offer]:
        """Offer attention, its largest logits and its preparation, norms, the rows of experts, and the activation."""
        from mplug_nn import specification as needs
        from mplug_nn.largest_logits import HIDING
        from mplug_triton import gelu, swiglu
        from mplug_triton.attention import attention
        from mplug_triton.largest_logits import maximum
        from mplug_triton.norm import norm_residual
        from mplug_triton.qkv import prepare_qkv
        from mplug_triton.rows import combine, dispatch
        from mplug_triton.sinkhorn import balanced_scores

        served = {needs.FULL, needs.DOCUMENTS, needs.WINDOW, needs.SOFT_CAP, needs.SINKS, needs.POSITION_GROUPS}
        served |= {needs.KEY_LENGTH, *needs.CAPABILITIES}
        return [
            Offer(
                {"Attention.core": attention},
                supports_attention,
                serves=served,
                optional=True,
                rate=rate_on(run.device),
                captures=self.captures,
            ),
            Offer({"LargestLogits.maximum": maximum}, supports_largest_logits, serves=HIDING, optional=True),
            Offer({"Norm.norm_residual": norm_residual}, supports_norm, optional=True),
            Offer({"Attention.prepare_qkv": prepare_qkv}, supports_qkv, serves=TURNING, optional=True),
            Offer({"Experts.dispatch": dispatch, "Experts.combine": combine}, supports_rows, optional=True),
            Offer({"Router.balanced_scores": balanced_scores}, supports_balance, optional=True),
            Offer({"MLP.activation": gelu.activation}, supports_activation, optional=True),
            Offer({"MLP.activation": swiglu.activation}, supports_swiglu, optional=True),
        ]


def rate_on(device: str) -> float:
    """The rate of attention; 0 on a GPU of a generation on which nothing has measured it."""
    if device != "cuda":
        return RATE
    from torch.cuda import get_device_capability, is_available

    return RATE if not is_available() or get_device_capability()[0] == MEASURED else 0.0


def supports_attention(site: Site, run: "Run") -> bool | str:
    """True for heads up to WIDEST_HEAD without dropout, on a GPU from Ampere on or in Triton's interpreter.

    For other sites the reason, or False if the config neither names a kernel for attention nor lets kernels compete.
    """
    reason = _reason_against_attention(site, run)
    return reason if reason and run.config.kernels.rivals else _answer(reason, "attention", run)


def supports_largest_logits(site: Site, run: "Run") -> bool | str:
    """True for keys up to WIDEST_HEAD, on a GPU from Ampere on or in Triton's interpreter.

    For other sites the reason, or False if the config does not name a kernel for them.
    """
    return _answer(_reason_against_heads(site, run), "largest_logits", run)


def _answer(reason: str, kind: str, run: "Run") -> bool | str:
    """True without a reason; a site that no kernel is named for is left to other kernels and plain torch."""
    return (reason if kind in run.config.kernels.kinds else False) if reason else True


def _reason_against_attention(site: Site, run: "Run") -> str:
    spec = site.module.spec
    if spec.dropout > 0:
        return f"it does not support dropout, and attention dropout is {spec.dropout:g}"
    return _reason_against_heads(site, run)


def _reason_against_heads(site: Site, run: "Run") -> str:
    width = site.module.spec.key_width
    if width > WIDEST_HEAD:
        return f"it supports head dims of up to {WIDEST_HEAD}, and this site's is {width}"
    runs = _runs(run)
    if isinstance(runs, str):
        return runs
    if run.device == "cuda":
        from torch.cuda import get_device_capability

        if (capability := get_device_capability()) < AMPERE:
            chip = ".".join(map(str, capability))
            return f"it supports GPUs of compute capability 8.0 and newer, and this GPU has {chip}"
    return ""


def supports_qkv(site: Site, run: "Run") -> bool | str:
    """True for an even head dim, with Triton and a CUDA GPU or Triton's interpreter; else the reason."""
    if site.module.head_dim % 2:
        return f"it supports even head dims, and this site's head dim is {site.module.head_dim}"
    return _runs(run)


def supports_norm(site: Site, run: "Run") -> bool | str:
    """True for rows up to WIDEST, with Triton and a CUDA GPU or its interpreter; else the reason."""
    width = len(site.module.weight)
    if width > WIDEST:
        return f"it supports rows of up to {WIDEST} elements, which fit into registers, and this site's have {width}"
    return _runs(run)


def supports_rows(site: Site, run: "Run") -> bool | str:
    """True for rows up to WIDEST, with Triton and a CUDA GPU or its interpreter; else the reason."""
    width = site.module.up.shape[-1]
    if width > WIDEST:
        return f"it supports rows of up to {WIDEST} elements, which fit into registers, and this site's have {width}"
    return _runs(run)


def supports_balance(site: Site, run: "Run") -> bool | str:
    """True for Sinkhorn's rounds over sequences up to LARGEST_SEQUENCE, with Triton and a GPU or its interpreter.

    False for routers that choose in another way. For other sites the reason, or False if the config names no kernel for
    the balance.
    """
    from mplug_nn.open_lists import SINKHORN

    gating = site.module.gating
    if not gating.balances:
        return False
    if gating.score not in SINKHORN:
        reason = f"it computes the balance of {' and '.join(SINKHORN)}, and this site's score is '{gating.score}'"
        return _answer(reason, "balance", run)
    size = run.config.trainer.seq_length * gating.num_experts
    if size > LARGEST_SEQUENCE:
        reason = (
            f"it supports up to {LARGEST_SEQUENCE} logits of a sequence, and trainer.seq_length times experts is {size}"
        )
        return _answer(reason, "balance", run)
    return _runs(run)


def _runs(run: "Run") -> bool | str:
    if run.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a CUDA GPU, and this run is on the CPU"
    if find_spec("triton") is None:
        return "triton is not installed; install 'mplug-triton[triton]'"
    if run.precision.activations not in NARROWER:
        word, format_ = run.config.trainer.precision, run.precision.activations
        return f"it computes in fp32, and trainer.precision={word} computes in {format_}"
    return True


def supports_activation(site: Site, run: "Run") -> bool | str:
    """True for exact GELU in compiled units in bf16 or fp16; False for SwiGLU, which another offer serves.

    For other sites: the reason if the user chose a kernel for activations, else False, so that plain torch serves them.
    """
    if site.module.kind == SWIGLU:
        return False
    return _answer(_reason_against_activation(site, run), "activation", run)


def supports_swiglu(site: Site, run: "Run") -> bool | str:
    """True for SwiGLU if the user chose a kernel for activations, with Triton and a CUDA GPU or its interpreter."""
    return site.module.kind == SWIGLU and "activation" in run.config.kernels.kinds and _runs(run)


def _reason_against_activation(site: Site, run: "Run") -> str:
    if site.module.kind != "gelu":
        return (
            f"it supports 'gelu' and 'swiglu', and this site's activation is '{site.module.kind}'; set "
            f"kernels.activation=null"
        )
    if run.precision.activations not in HALF:
        return f"its slopes have errors of up to 2.8e-6, which are too large for {run.precision.activations}"
    if run.compiler is None:
        return (
            f"it is fast only in compiled units, and this run's units are eager "
            f"(trainer.compile={run.config.trainer.compile} on '{run.device}')"
        )
    return ""
