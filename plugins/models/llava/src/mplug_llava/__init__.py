"""LLaVA: a CLIP or SigLIP tower, a projector, and a decoder of any installed family."""

from typing import TYPE_CHECKING

from mplug import UsageError, hookimpl, listed
from mplug_llava.config import LlavaConfig
from mplug_llava.presets import PRESETS
from mplug_llava.published import FORMS
from mplug_llava.published_towers import PARTS
from mplug_llava.vision import CONTEXT

if TYPE_CHECKING:
    from mplug import Model, Processor, Run


class Llava:
    """A tower over the patches of pictures, whose projected rows stand in the text of a decoder."""

    Config, presets, public_forms, public_parts = LlavaConfig, PRESETS, FORMS, PARTS

    def __init__(self, config: LlavaConfig) -> None:
        self.config = config

    @hookimpl
    def build_model(self, run: "Run") -> "Model":
        """The tower, the projector and the decoder on the meta device, and their plan."""
        from mplug_llava.build import build

        missing = [name for name in CONTEXT if name not in run.entries]
        if missing and run.trains:
            (loader,) = run.hooks.implementers("build_loader")
            raise UsageError(
                f"micro batches of {loader} have no {listed(map(repr, missing))}, which the tower of 'model.vision' "
                f"needs; use a data plugin that supplies images (--data mock --set data.media=2), or train the decoder "
                f"alone (--model {self.config.decoder.name})"
            )
        return build(self.config, self.config.decoder.build(run), has_images=not missing)

    @hookimpl
    def build_processor(self) -> "Processor":
        """What makes the entries of the tower."""
        from mplug_llava.processor import PictureProcessor

        return PictureProcessor(self.config)

    @hookimpl
    def captures(self) -> str:
        """The number of patches differs from micro batch to micro batch."""
        return "has a tower, whose number of patches differs between micro batches"
