"""Llama: decoders of the Llama 2 and 3 families, from 1 to 405 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_llama.config import LlamaConfig
from mplug_llama.presets import PRESETS
from mplug_llama.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class Llama:
    """Pre-norm decoders with RMSNorm, rotary positions, grouped heads and SwiGLU (arXiv 2307.09288, 2407.21783)."""

    presets = PRESETS

    Config = LlamaConfig
    public_forms = FORMS

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug_nn import build_decoder

        return build_decoder(self.config)

    @hookimpl
    def captures(self) -> bool:
        """No module has a state on the CPU or draws from torch's generators."""
        return True
