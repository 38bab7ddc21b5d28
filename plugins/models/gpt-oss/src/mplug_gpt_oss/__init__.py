"""gpt-oss: decoders with mixtures of experts and attention sinks, of 21 and 117 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_gpt_oss.config import GptOssConfig
from mplug_gpt_oss.presets import PRESETS
from mplug_gpt_oss.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class GptOss:
    """Decoders with attention sinks, alternating windows and clamped SwiGLU experts with biases (arXiv 2508.10925)."""

    presets = PRESETS

    Config = GptOssConfig
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
