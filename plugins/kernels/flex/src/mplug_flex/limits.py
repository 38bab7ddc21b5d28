"""The limits of flex_attention: what the plugin offers, and the runs that it refuses."""

from typing import TYPE_CHECKING

import torch

from mplug import Site, triton_builds
from mplug_nn.specification import (
    ALIBI,
    CAPABILITIES,
    CROSS,
    DOCUMENTS,
    FULL,
    KEY_LENGTH,
    POSITION_GROUPS,
    RELATIVE,
    SINKS,
    SOFT_CAP,
    VALUE_WIDTH,
    WINDOW,
)

if TYPE_CHECKING:
    from mplug import Run

AMPERE = (8, 0)
NARROWEST, WIDEST = 16, 256
"""Widths of a head on a GPU: a matrix product of Triton needs 16, and shared memory holds tiles of up to 256."""
OFFERED = (
    frozenset(
        {
            FULL,
            DOCUMENTS,
            WINDOW,
            SOFT_CAP,
            SINKS,
            VALUE_WIDTH,
            KEY_LENGTH,
            POSITION_GROUPS,
            CROSS,
            f"{ALIBI} bias",
            f"{RELATIVE} bias",
        }
    )
    | CAPABILITIES
)


def supports(device: str, site: Site, run: "Run") -> bool | str:
    """True if flex_attention computes the site in this run on 'cpu' or 'cuda'; else the reason why it does not.

    The offer for 'cuda' says why runs on other devices are refused. False: the other offer answers.
    """
    if (run.device == "cpu") != (device == "cpu"):
        return False
    if {DOCUMENTS, KEY_LENGTH} <= site.needs:
        return "it supports documents only if there are as many keys as queries, and this site needs 'key length'"
    spec = site.module.spec
    if spec.dropout > 0:
        return f"it does not support dropout, and attention dropout is {spec.dropout:g}"
    if run.device == "cpu":
        return True
    if run.device != "cuda":
        return f"it needs a CUDA GPU or a CPU, and trainer.device is '{run.device}'"
    return _limit_on_gpu(site, run) or True


def _limit_on_gpu(site: Site, run: "Run") -> str:
    capability, spec = torch.cuda.get_device_capability(), site.module.spec
    if run.precision.activations == "float64":
        return f"on a GPU it computes scores in fp32, and trainer.precision={run.config.trainer.precision} is wider"
    if capability < AMPERE:
        chip = ".".join(map(str, capability))
        return f"it supports GPUs of compute capability 8.0 and newer, and this GPU has {chip}"
    for what, width in (("head dims", spec.key_width), ("value widths", spec.value_width)):
        if not NARROWEST <= width <= WIDEST:
            return f"on a GPU it supports {what} of {NARROWEST} to {WIDEST}, and this site has {width}"
    if f"{RELATIVE} bias" in site.needs and run.config.trainer.deterministic:
        return (
            "the gradient of a relative bias is summed by atomic additions, whose order varies, and "
            "trainer.deterministic is set"
        )
    if not triton_builds():
        return "it needs Triton, a C compiler and Python's headers, and one of them is not installed"
    return ""
