"""T5, T5 v1.1 and FLAN-T5: an encoder, and a decoder that attends to the encoder's output."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_t5.config import T5Config
from mplug_t5.presets import PRESETS
from mplug_t5.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class T5:
    """Relative biases by ranges of distances, no scale of attention, and two sequences of different lengths."""

    Config, presets, public_forms = T5Config, PRESETS, FORMS

    def __init__(self, config: T5Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The model on the meta device, and its plan."""
        from mplug_t5.build import build

        return build(self.config)
