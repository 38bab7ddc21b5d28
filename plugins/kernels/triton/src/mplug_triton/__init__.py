"""Fused kernels in Triton: norms with the residual addition before them, and QK-norm and rotary positions.

These split the packed projection on the way, and write its gradient in one pass. And GELU that leaves fusing to the
compiler, which writes Triton too.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run

WIDEST = 16384
"""Numbers of the widest row that a norm's program holds in registers."""


class Triton:
    """Norms, fused with the residual addition; QK-norm and rotary positions, with the split; GELU without an erf."""

    class Config(BaseModel):
        """It has nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Norms; queries, keys and values from packed heads; the activation."""
        from mplug_triton.gelu import activation
        from mplug_triton.norm import norm_residual
        from mplug_triton.qkv import prepare_qkv

        return [
            Offer({"Norm.norm_residual": norm_residual}, supports_norm),
            Offer({"Attention.prepare_qkv": prepare_qkv}, supports_qkv),
            Offer({"MLP.activation": activation}, supports_activation),
        ]


def supports_qkv(site: Site, run: "Run") -> bool | str:
    """Heads of an even width, where there is Triton and a GPU that it compiles for, or its interpreter."""
    if site.module.head_dim % 2:
        return f"it pairs the halves of a head, and this site's head dim is {site.module.head_dim}"
    return _runs(site, run)


def supports_norm(site: Site, run: "Run") -> bool | str:
    """Rows that fit a program, where there is Triton and a GPU that it compiles for, or its interpreter."""
    width = len(site.module.weight)
    if width > WIDEST:
        return f"it holds a row in registers, of up to {WIDEST} numbers, and this site's has {width}"
    return _runs(site, run)


def _runs(site: Site, run: "Run") -> bool | str:
    if site.needs:
        return site.not_offered
    if find_spec("triton") is None:
        return "triton is not installed; install 'mplug-triton[triton]'"
    if run.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a CUDA GPU, and this run is on the CPU"
    if run.config.trainer.precision == "fp64":
        return "it computes in fp32, and trainer.precision is fp64"
    return True


def supports_activation(site: Site, run: "Run") -> bool | str:
    """Exact GELU in compiled units, in less than fp32: as the default kernel it leaves the rest to plain torch."""
    reason = _reason_against_activation(site, run)
    if not reason:
        return True
    return reason if "activation" in run.config.kernels.kinds else False


def _reason_against_activation(site: Site, run: "Run") -> str:
    if site.needs:
        return site.not_offered
    if site.module.kind != "gelu":
        return f"it computes 'gelu', and has nothing but plain torch (kernels.activation=null) for '{site.module.kind}'"
    precision = run.config.trainer.precision
    if precision in ("fp32", "fp64"):
        return f"its slopes are off by up to 2.8e-6, which bf16 rounds away and {precision} does not"
    if run.compiler is None:
        return (
            f"only a compiler makes one pass of it, and this run's units are eager "
            f"(trainer.compile={run.config.trainer.compile} on '{run.device}')"
        )
    return ""
