"""Checkpoints of other libraries that `mplug checkpoint import` reads, by the name of their form. Imports no torch.

A form is an entry of the open list `mplug.foreign_checkpoints`. Its class says which tensors a folder has and reads
boxes of them. The host finds out which parameters these tensors are, and writes the new run.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import PluginError, RunError, UsageError
from mplug.open_lists import FOREIGN_CHECKPOINTS

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.config.binding import RunConfig
    from mplug.layout.external import Link
    from mplug.model.model import Model

Shape = tuple[int, ...]
WEIGHT = "weight"
"""The name with which `ForeignCheckpoint.read` reads the values of a tensor, instead of one of its states."""


@dataclass(frozen=True)
class ForeignTensor:
    """A weight of a foreign checkpoint.

    `states` are the optimizer states of the weight, by the names that optimizers of mplug give them (`exp_avg`,
    `exp_avg_sq`, `step`). The value of a state is None if the state has the shape of the weight, or a number.

    If tensor parallelism has cut the weight into `parts` equal parts, or each of its `parts` ranks has saved a copy,
    `shape` is the shape of one part. The host finds the dimension that is cut.
    """

    shape: Shape
    states: Mapping[str, float | None] = field(default_factory=dict)
    parts: int = 1


class ForeignCheckpoint(ABC):
    """A checkpoint of another library. A distribution adds a class in the group 'mplug.foreign_checkpoints'.

    The name of the entry point is the word after `--from`. The constructor takes the folder that the user names. It
    reads the description of the tensors and no values. It raises UsageError, with one sentence, for a folder that it
    cannot read. It never runs code that the checkpoint contains.

    `path` is the folder with the files, for messages. `tensors` are all weights by their names in the checkpoint,
    without anything that is no weight. `step` is the number of updates that the optimizer has made.
    """

    path: Path
    tensors: Mapping[str, ForeignTensor]
    step: int = 0

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @abstractmethod
    def read(self, tensor: str, start: Shape, shape: Shape, state: str = WEIGHT, part: int = 0) -> "Tensor":
        """A box of a tensor, or of one of its states, in the format of the master weights.

        The host reads parameter after parameter. So an implementation needs memory for one tensor at most.
        """

    def links(self, model: "Model") -> "Mapping[str, Sequence[Link]] | None":
        """For each parameter and state of the model, the regions of the tensors that hold it; none if there are none.

        None (the default): the tensors have the names of the model's own parameters, or those of its published form.
        """
        del model
        return None

    def compare(self, config: "RunConfig") -> Sequence[str]:
        """Raise UsageError if the checkpoint states a setting that contradicts the run's, such as the number of heads.

        Returns what the user should know about the comparison. The host compares the shapes of all tensors itself.
        """
        del config
        return ()


def open_foreign(form: str, folder: Path) -> ForeignCheckpoint:
    """The checkpoint in a folder. UsageError if no distribution reads this form, or the folder is not of this form."""
    try:
        kind = FOREIGN_CHECKPOINTS.load(form)
    except ValueError as error:
        raise UsageError(f"--from: {error}") from None
    except ImportError as error:
        raise UsageError(f"--from '{form}' cannot be used: its module cannot be imported ({error})") from error
    if not (isinstance(kind, type) and issubclass(kind, ForeignCheckpoint)):
        raise UsageError(f"--from '{form}' cannot be used: {kind!r} is no subclass of mplug.ForeignCheckpoint")
    try:
        opened: ForeignCheckpoint = kind(folder)
        wrong = [name for name, found in opened.tensors.items() if not _is_valid(found)]
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise PluginError(
            f"--from '{form}': {kind.__module__}.{kind.__name__} failed with {type(error).__name__}: {error}; report "
            f"it to the authors of the form"
        ) from error
    if wrong:
        raise PluginError(
            f"--from '{form}': {kind.__module__}.{kind.__name__} describes '{wrong[0]}' by "
            f"{opened.tensors[wrong[0]]!r}, which is no valid mplug.ForeignTensor"
        )
    return opened


def _is_valid(found: object) -> bool:
    return isinstance(found, ForeignTensor) and found.parts >= 1 and WEIGHT not in found.states
