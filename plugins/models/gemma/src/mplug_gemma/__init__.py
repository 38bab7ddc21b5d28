"""Gemma: decoders of the Gemma 2 and Gemma 3 (text) families, from 0.3 to 27 billion parameters."""

from mplug_gemma.config import GemmaConfig
from mplug_gemma.presets import PRESETS
from mplug_gemma.published import FORMS
from mplug_nn import DecoderFamily


class Gemma(DecoderFamily):
    """Decoders with norms around each part, GeGLU and blocks with windows (arXiv 2408.00118, 2503.19786)."""

    Config, presets, public_forms = GemmaConfig, PRESETS, FORMS
