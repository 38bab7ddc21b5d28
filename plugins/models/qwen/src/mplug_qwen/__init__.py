"""Qwen: decoders of the Qwen2.5, Qwen3 and Qwen3-MoE families, from 0.5 to 235 billion parameters."""

from mplug_nn import DecoderFamily
from mplug_qwen.config import QwenConfig
from mplug_qwen.presets import PRESETS
from mplug_qwen.published import FORMS


class Qwen(DecoderFamily):
    """Decoders with biases of queries, keys and values (Qwen2.5), or with QK-norm and experts (Qwen3)."""

    Config, presets, public_forms = QwenConfig, PRESETS, FORMS
