"""Begin a run with a folder that a format opens for an import too: the default of `Format.open_published`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mplug.model.model import Model
from mplug_pretrained.external import Link
from mplug_pretrained.foreign import ForeignCheckpoint, Shape, open_foreign
from mplug_pretrained.foreign_match import Match, best_match, needed_of, refuse_mismatch
from mplug_pretrained.published import FolderWeights, PublishedFolder
from mplug_pretrained.transfer import Read
from mplug_pretrained.wanted import REMEDY, Wanted


@dataclass(frozen=True)
class ForeignFolder(PublishedFolder):
    """A folder that each rank opens itself."""

    name: str
    open_folder: Callable[[Path], ForeignCheckpoint]
    path: Path

    def weights(self, model: Model) -> "ForeignWeights":
        """The weights of the checkpoint that the format opens."""
        return ForeignWeights(model, best_match(model, open_foreign(self.name, self.open_folder, self.path)))


class ForeignWeights(FolderWeights):
    """The weights of a foreign checkpoint for a model."""

    def __init__(self, model: Model, found: Match) -> None:
        self.model, self.found = model, found
        self.links, self.present = found.links, found.checkpoint.tensors.keys()

    def refuse_other_model(self, label: str, wanted: Wanted) -> None:
        """Compare the names and shapes of all tensors."""
        needed = {name: one for name, one in needed_of(self.model).items() if name in wanted.names}
        refuse_mismatch(self.found, needed, label, REMEDY, wanted)

    def copies(self, name: str, wanted: Wanted) -> Sequence[Link]:
        """The tensors of other names of a tied parameter."""
        if name not in wanted.names:
            return ()
        return [one for one in self.found.present_copies(name) if not wanted.allows(self.found.name(one.public(0)))]

    @cached_property
    def _read(self) -> Read:
        return self.found.reader()

    def read(self, tensor: str, start: Shape, shape: Shape) -> Tensor:
        """A box, which may lie in several parts of the tensor."""
        return self._read(tensor, start, shape)
