"""What a format exchanges with the host: the weights of a folder for one model, and what an export writes.

Importing this module imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mplug_pretrained.foreign import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mplug.model.model import Model
    from mplug_pretrained.adapters import Merge, RowNorms
    from mplug_pretrained.expansion import Conversion
    from mplug_pretrained.external import Link
    from mplug_pretrained.wanted import Wanted


class FolderWeights(ABC):
    """The weights of a folder for one model. Each rank makes one, and reads the boxes that it holds.

    `links` are the regions of the folder's tensors that hold each parameter and state, by our names; a name without
    links keeps its initial values. `present` are the names of the folder's tensors, which patterns of
    `checkpoint.pretrained.except` may match. The object is a context: files stay open in its block only.
    """

    links: "Mapping[str, Sequence[Link]]"
    present: Collection[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        del error

    @abstractmethod
    def refuse_other_model(self, label: str, wanted: "Wanted") -> None:
        """Raise UsageError unless the folder has the wanted parameters, and nothing that the model does not use.

        `label` names the folder in the error. Reads no values.
        """

    @abstractmethod
    def read(self, tensor: str, start: Shape, shape: Shape) -> "Tensor":
        """A box of a tensor that a link names."""

    def copies(self, name: str, wanted: "Wanted") -> "Sequence[Link]":
        """The links of tensors in the folder that repeat a parameter: they must be equal to it."""
        del name, wanted
        return ()

    @property
    def widest(self) -> "torch.dtype":
        """A type that holds all values of the folder exactly."""
        import torch  # what only describes folders imports no torch

        return torch.float64

    def keep(self, directory: Path) -> None:
        """Write what an export of this format needs of the folder beside the weights into a folder of the run."""
        del directory


class PublishedFolder(ABC):
    """A folder whose description rank 0 has read. It is pickled, and sent to the other ranks."""

    path: Path

    @abstractmethod
    def weights(self, model: "Model") -> FolderWeights:
        """The weights for a model. Reads no values. UsageError if the model has no form of this format."""


@dataclass(frozen=True)
class ExportOptions:
    """What the user of an export has chosen.

    `dtype` is the type of all tensors; None: that of the folder with which the run began, or that of the run.
    `shard_bytes` is the maximum size of a file. `kept` is the folder to which `FolderWeights.keep` wrote; None if the
    run did not begin with a folder of this format. `quantize` is the form of quantised weights, one of the format's
    `quantizations`; None: they are not quantised.
    """

    dtype: str | None
    shard_bytes: int
    kept: Path | None = None
    quantize: str | None = None


ExportValues = Callable[[str, str], "Tensor"]
"""A whole tensor of an export: (its name in `Export.conversion`, torch's name of its type) -> its values."""


class Export(ABC):
    """What an export writes. The host reads the checkpoint, and at most one tensor is in memory at a time.

    `conversion` are the exported tensors and the regions of our parameters that they hold. `merges` are parameters
    whose values the host computes from several ones, and `offsets` parameters that are written as their sum with
    norms.
    """

    conversion: "Conversion"
    merges: "Mapping[str, Merge]"
    offsets: "Mapping[str, RowNorms]"

    @abstractmethod
    def write(self, folder: Path, values: ExportValues) -> list[str]:
        """Write all files into a new folder; returns the names of those with tensors."""
