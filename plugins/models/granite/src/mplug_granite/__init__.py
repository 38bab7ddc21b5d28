"""Granite: dense decoders (3), and hybrids of Mamba-2 and attention (4), of 0.4 to 32 billion parameters."""

from mplug_granite.config import GraniteConfig
from mplug_granite.presets import PRESETS
from mplug_granite.published import FORMS
from mplug_nn import DecoderFamily


class Granite(DecoderFamily):
    """Decoders whose embeddings, residual branches, attention scores and logits have factors of their own."""

    Config, presets, public_forms = GraniteConfig, PRESETS, FORMS
