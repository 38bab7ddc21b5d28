"""Qwen: decoders of the Qwen2.5, Qwen3 and Qwen3-MoE families, from 0.5 to 235 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_qwen.config import QwenConfig
from mplug_qwen.presets import PRESETS
from mplug_qwen.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class Qwen:
    """Decoders with biases of queries, keys and values (Qwen2.5), or with QK-norm and experts (Qwen3)."""

    presets = PRESETS

    Config = QwenConfig
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
