"""Gemma: the Gemma 2 and Gemma 3 families, from 0.3 to 27 billion parameters; Gemma 3 with or without a tower."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_gemma.config import GemmaConfig
from mplug_gemma.presets import PRESETS
from mplug_gemma.published import FORMS
from mplug_gemma.vision import CONTEXT
from mplug_nn import DecoderFamily

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_streams import Processor


class Gemma(DecoderFamily):
    """Decoders with norms around each part, GeGLU and blocks with windows (arXiv 2408.00118, 2503.19786).

    With a tower over patches, the pooled rows of images stand in the text.
    """

    Config, presets, public_forms = GemmaConfig, PRESETS, FORMS
    config: GemmaConfig

    @hookimpl
    def build_model(self, run: "Run") -> "Model":
        """The decoder, with its tower if it has one, on the meta device, and the plan."""
        from mplug_gemma.build import build

        return build(self.config, has_images=self.config.vision is None or run.entries.issuperset(CONTEXT))

    @hookimpl
    def build_processor(self) -> "Processor | None":
        """What makes the entries of the tower, if there is one."""
        from mplug_gemma.processor import VisionProcessor

        return None if self.config.vision is None else VisionProcessor(self.config.vision)

    @hookimpl
    def captures(self) -> bool | str:
        """True without a tower: a tower's number of patches differs from micro batch to micro batch."""
        return self.config.vision is None or "has a tower, whose number of patches differs between micro batches"
