"""Gemma: decoders of the Gemma 2 and Gemma 3 (text) families, from 0.3 to 27 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_gemma.config import GemmaConfig
from mplug_gemma.presets import PRESETS
from mplug_gemma.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class Gemma:
    """Decoders with norms around each part, GeGLU and blocks with windows (arXiv 2408.00118, 2503.19786)."""

    presets = PRESETS

    Config = GemmaConfig
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
