"""Qwen-VL: Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, from 2 to 235 billion parameters."""

from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug_nn import DecoderFamily
from mplug_qwen_vl.config import QwenVLConfig
from mplug_qwen_vl.presets import PRESETS
from mplug_qwen_vl.published import FORMS
from mplug_qwen_vl.vision import entries_of

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_streams import Processor


class QwenVL(DecoderFamily):
    """A tower over patches whose merged rows stand in the text of a Qwen decoder, or the decoder alone."""

    Config, presets, public_forms = QwenVLConfig, PRESETS, FORMS
    config: QwenVLConfig

    @hookimpl
    def build_model(self, run: "Run") -> "Model":
        """The tower and the decoder on the meta device, and their plan."""
        from mplug_qwen_vl.build import build

        needed = () if self.config.vision is None else entries_of(self.config.vision)
        return build(self.config, has_images=run.entries.issuperset(needed))

    @hookimpl
    def build_processor(self) -> "Processor | None":
        """What makes the entries of the tower, if there is one."""
        from mplug_qwen_vl.processor import VisionProcessor

        return None if self.config.vision is None else VisionProcessor(self.config.vision)

    @hookimpl
    def captures(self) -> bool | str:
        """True without a tower: a tower's number of patches differs from micro batch to micro batch."""
        return self.config.vision is None or "has a tower, whose number of patches differs between micro batches"
