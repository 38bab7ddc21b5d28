"""Llama: decoders of the Llama 2 and 3 families, from 1 to 405 billion parameters."""

from mplug_llama.config import LlamaConfig
from mplug_llama.presets import PRESETS
from mplug_llama.published import FORMS
from mplug_nn import DecoderFamily


class Llama(DecoderFamily):
    """Pre-norm decoders with RMSNorm, rotary positions, grouped heads and SwiGLU (arXiv 2307.09288, 2407.21783)."""

    Config, presets, public_forms = LlamaConfig, PRESETS, FORMS
