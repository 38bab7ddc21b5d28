"""Checkpoints of Megatron-LM in the format `torch_dist`, of dense decoders."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug_pretrained import Format

if TYPE_CHECKING:
    from mplug_pretrained import ForeignCheckpoint


class Megatron(Format):
    """Reads the weights. Nothing is written in this format."""

    def open(self, folder: Path) -> "ForeignCheckpoint":
        """The checkpoint of an iteration, or the newest one in a folder of iterations."""
        from mplug_megatron_format.checkpoint import MegatronCheckpoint  # imports torch

        return MegatronCheckpoint(folder)
