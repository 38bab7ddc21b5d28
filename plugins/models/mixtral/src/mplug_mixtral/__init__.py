"""Mixtral: decoders with mixtures of experts as feed-forward parts, from a toy to 141 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_mixtral.config import MixtralConfig
from mplug_mixtral.presets import PRESETS
from mplug_mixtral.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class Mixtral:
    """A decoder with RMSNorm, rotary positions, grouped heads and SwiGLU experts (arXiv 2401.04088, 2412.19437)."""

    presets = PRESETS

    Config = MixtralConfig
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
