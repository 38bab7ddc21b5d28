"""gpt-oss: decoders with mixtures of experts and attention sinks, of 21 and 117 billion parameters."""

from mplug_gpt_oss.config import GptOssConfig
from mplug_gpt_oss.presets import PRESETS
from mplug_gpt_oss.published import FORMS
from mplug_nn import DecoderFamily


class GptOss(DecoderFamily):
    """Decoders with attention sinks, alternating windows and clamped SwiGLU experts with biases (arXiv 2508.10925)."""

    Config, presets, public_forms = GptOssConfig, PRESETS, FORMS
