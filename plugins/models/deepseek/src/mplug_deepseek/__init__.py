"""DeepSeek: decoders of the V2 and V3 families, from 16 to 671 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_deepseek.config import DeepseekConfig
from mplug_deepseek.presets import PRESETS
from mplug_deepseek.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class Deepseek:
    """Decoders with latent attention and fine-grained experts (arXiv 2405.04434, 2412.19437)."""

    presets = PRESETS

    Config = DeepseekConfig
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
