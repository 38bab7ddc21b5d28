"""Mixtral: decoders with mixtures of experts as feed-forward parts, from a toy to 141 billion parameters."""

from mplug_mixtral.config import MixtralConfig
from mplug_mixtral.presets import PRESETS
from mplug_mixtral.published import FORMS
from mplug_nn import DecoderFamily


class Mixtral(DecoderFamily):
    """A decoder with RMSNorm, rotary positions, grouped heads and SwiGLU experts (arXiv 2401.04088, 2412.19437)."""

    Config, presets, public_forms = MixtralConfig, PRESETS, FORMS
