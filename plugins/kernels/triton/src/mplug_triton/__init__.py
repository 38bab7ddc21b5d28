"""Fused kernels in Triton: queries, keys and values out of their packed projection, and its gradient in one pass."""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Triton:
    """QK-norm and rotary positions, fused with splitting the packed projection."""

    class Config(BaseModel):
        """It has nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Queries, keys and values from packed heads."""
        from mplug_triton.qkv import prepare_qkv

        return [Offer({"Attention.prepare_qkv": prepare_qkv}, supports)]


def supports(site: Site, run: "Run") -> bool | str:
    """Heads of an even width, where there is Triton and a GPU that it compiles for, or its interpreter."""
    if site.needs:
        return f"it does not offer {', '.join(sorted(site.needs))}"
    if find_spec("triton") is None:
        return "triton is not installed; install 'mplug-triton[triton]'"
    if run.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a CUDA GPU, and this run is on the CPU"
    if site.module.head_dim % 2:
        return f"it pairs the halves of a head, and this site's head dim is {site.module.head_dim}"
    return True
