"""LLaVA: a CLIP or SigLIP tower, a projector, and a decoder of any installed family."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_llava.config import LlavaConfig
from mplug_llava.presets import PRESETS
from mplug_llava.published import FORMS
from mplug_llava.published_towers import PARTS

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_streams import Processor


class Llava:
    """A tower over the patches of pictures, whose projected rows stand in the text of a decoder."""

    Config, presets, public_forms, public_parts = LlavaConfig, PRESETS, FORMS, PARTS

    def __init__(self, config: LlavaConfig) -> None:
        self.config = config

    @hookimpl
    def build_model(self, run: "Run") -> "Model":
        """The tower, the projector and the decoder on the meta device, and their plan."""
        from mplug_llava.build import build

        has_images = run.entries.issuperset(self.config.context)
        return build(self.config, self.config.decoder.build(run), has_images=has_images)

    @hookimpl
    def build_processor(self) -> "Processor":
        """What makes the entries of the tower."""
        from mplug_llava.processor import PictureProcessor, TileProcessor

        return PictureProcessor(self.config) if self.config.tiling is None else TileProcessor(self.config)

    @hookimpl
    def captures(self) -> str:
        """The number of patches differs from micro batch to micro batch."""
        return "has a tower, whose number of patches differs between micro batches"
