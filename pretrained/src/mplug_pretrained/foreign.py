"""Checkpoints of other libraries, as a format opens them (`Format.open`). Imports no torch.

The class says which tensors a folder has, and reads boxes of them. The host finds out which parameters these tensors
are, and writes the new run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import PluginError, RunError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.config.binding import RunConfig
    from mplug.model.model import Model
    from mplug_pretrained.external import Link

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
    """A checkpoint of another library. The constructor reads the description of the tensors and no values.

    `path` is the folder with the files, for messages. `tensors` are all weights by their names in the checkpoint,
    without anything that is no weight. `step` is the number of updates that the optimizer has made.
    """

    path: Path
    tensors: Mapping[str, ForeignTensor]
    step: int = 0

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


def open_foreign(name: str, open_folder: Callable[[Path], ForeignCheckpoint], folder: Path) -> ForeignCheckpoint:
    """The checkpoint that a format opens in a folder; `name` is the word that the user typed for the format."""
    try:
        opened = open_folder(folder)
        is_one = isinstance(opened, ForeignCheckpoint)
        wrong = [one for one, found in opened.tensors.items() if not _is_valid(found)] if is_one else []
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise PluginError(
            f"the format '{name}' failed to open '{folder}' with {type(error).__name__}: {error}; report it to the "
            f"authors of the format"
        ) from error
    if not is_one:
        raise PluginError(
            f"the format '{name}' opened '{folder}' as {opened!r}, which is no mplug_pretrained.ForeignCheckpoint"
        )
    if wrong:
        raise PluginError(
            f"the format '{name}' describes '{wrong[0]}' of '{folder}' by {opened.tensors[wrong[0]]!r}, which is no "
            f"valid mplug_pretrained.ForeignTensor"
        )
    return opened


def _is_valid(found: object) -> bool:
    return isinstance(found, ForeignTensor) and found.parts >= 1 and WEIGHT not in found.states
