"""A format: how other software keeps models, and how mplug reads and writes its folders (kind `formats`).

The entry point's name is the word after `--from` and `--to`. Importing this module imports no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mplug.errors import UsageError
from mplug_pretrained.described import DescribesModels
from mplug_pretrained.foreign import ForeignCheckpoint
from mplug_pretrained.published import Export, ExportOptions, FolderWeights, PublishedFolder

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run


class Format(DescribesModels):
    """A form in which other software keeps models. A plugin of the kind `formats` is a subclass.

    Every method is optional; the host refuses what a format does not have, with the methods that it has. What a method
    reads is untrusted: it raises UsageError, with one sentence, for a folder that it cannot read, and never runs code
    that the folder contains.

    - `mplug train --pretrained FOLDER` calls `recognises`, `describe`, `settings` and `open_published`.
    - `mplug checkpoint import --from NAME FOLDER` calls `open`.
    - `mplug checkpoint export --to NAME FOLDER` calls `export`, and `usage` at its end.
    - `mplug explain` calls `form_of`.
    - Adapters (`mplug_pretrained.Adapters.format`) of a run begin with a folder that `open_adapters` reads.

    `quantizations` are the names of the quantised forms that an export can write (`ExportOptions.quantize`).
    """

    quantizations: ClassVar[tuple[str, ...]] = ()

    def open(self, folder: Path) -> ForeignCheckpoint:
        """The checkpoint in a folder, for an import."""
        raise UsageError(
            f"this format has no import; if '{folder}' has a published model, begin a run with it: mplug train "
            f"--pretrained {folder}"
        )

    def open_published(self, folder: Path) -> PublishedFolder:
        """The folder with which a run begins. The default: the weights that `open` reads."""
        from mplug_pretrained.foreign_published import ForeignFolder  # imports torch

        return ForeignFolder(type(self).__name__, self.open, folder)

    def export(self, run: "Run", model: "Model", options: ExportOptions) -> Export:
        """What an export of a run writes. UsageError if this format cannot express the run's model."""
        raise UsageError("this format writes no checkpoints; name another one with --to")

    def usage(self, run: "Run", folder: str) -> list[str]:
        """How to use the folder (or the address) of an export of the run: code or commands, each a clause."""
        return []

    def open_adapters(self, folder: Path, model: "Model") -> FolderWeights:
        """The adapters in a folder, for a model with adapters. UsageError unless the run computes the same with them.

        Reads no values.
        """
        raise UsageError(f"'{folder}' is of a format without adapters; name a folder of another one")
