"""Gemma: the Gemma 2 and Gemma 3 families, from 0.3 to 27 billion parameters; Gemma 3 with or without a tower."""

from typing import TYPE_CHECKING

from mplug import UsageError, hookimpl, listed
from mplug_gemma.config import GemmaConfig
from mplug_gemma.presets import PRESETS
from mplug_gemma.published import FORMS
from mplug_gemma.vision import CONTEXT
from mplug_nn import DecoderFamily

if TYPE_CHECKING:
    from mplug import Model, Processor, Run


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

        missing = [] if self.config.vision is None else [name for name in CONTEXT if name not in run.entries]
        if missing and run.trains:
            (loader,) = run.hooks.implementers("build_loader")
            raise UsageError(
                f"micro batches of {loader} have no {listed(map(repr, missing))}, which the tower of 'model.vision' "
                f"needs; use a data plugin that supplies images (--data mock --set data.media=2), or train a decoder "
                f"of text (--set model.vision=null)"
            )
        return build(self.config, has_images=not missing)

    @hookimpl
    def build_processor(self) -> "Processor | None":
        """What makes the entries of the tower, if there is one."""
        from mplug_gemma.processor import VisionProcessor

        return None if self.config.vision is None else VisionProcessor(self.config.vision)

    @hookimpl
    def captures(self) -> bool | str:
        """True without a tower: a tower's number of patches differs from micro batch to micro batch."""
        return self.config.vision is None or "has a tower, whose number of patches differs between micro batches"
