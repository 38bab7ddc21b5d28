"""DeepSeek: decoders of the V2 and V3 families, from 16 to 671 billion parameters."""

from mplug_deepseek.config import DeepseekConfig
from mplug_deepseek.presets import PRESETS
from mplug_deepseek.published import FORMS
from mplug_nn import DecoderFamily


class Deepseek(DecoderFamily):
    """Decoders with latent attention and fine-grained experts (arXiv 2405.04434, 2412.19437)."""

    Config, presets, public_forms = DeepseekConfig, PRESETS, FORMS
