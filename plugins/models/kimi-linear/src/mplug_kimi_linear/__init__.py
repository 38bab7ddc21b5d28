"""Kimi Linear: decoders with Kimi delta attention and latent attention, of 49 billion parameters."""

from mplug_kimi_linear.config import KimiLinearConfig
from mplug_kimi_linear.presets import PRESETS
from mplug_kimi_linear.published import FORMS
from mplug_nn import DecoderFamily


class KimiLinear(DecoderFamily):
    """Kimi delta attention, latent attention without positions, and experts (arXiv 2510.26692)."""

    Config, presets, public_forms = KimiLinearConfig, PRESETS, FORMS
