"""Checkpoints that DeepSpeed's own engine has written: ZeRO stages 1 to 3, and universal checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug_pretrained import Format

if TYPE_CHECKING:
    from mplug_pretrained import ForeignCheckpoint


class DeepSpeed(Format):
    """Reads the weights and the states of Adam. Nothing is written in this format."""

    def open(self, folder: Path) -> "ForeignCheckpoint":
        """The checkpoint of a folder of `save_checkpoint`, or of a universal one."""
        from mplug_deepspeed_format.checkpoint import DeepSpeedCheckpoint  # imports torch

        return DeepSpeedCheckpoint(folder)
