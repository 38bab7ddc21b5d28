"""What the host asks of the package by which a run updates weights with more than one optimizer of all pieces."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from mplug.contracts.optimizer import Optimizer, Piece
from mplug.contracts.stepper import Stepper
from mplug.errors import listed
from mplug.model.model import Model
from mplug.registry.provided import needed
from mplug.run.run import Run

if TYPE_CHECKING:
    from mplug.distributed.groups import Groups


IN_CPU_MEMORY = "optimizer state in CPU memory"
"""What `mplug_estimates.measure_bytes` counts that is not on the run's device."""


class Updates(Protocol):
    """The methods of the class in the entry-point group 'mplug.updates'.

    The host calls them if the config has groups, an average or states in CPU memory (`optimizer.groups`, `average`,
    `offload`), or if the plan has a base model of other widths or recalls entries.
    """

    def grouped(self, run: Run, model: Model) -> Mapping[str, int]:
        """The number of the group of each trained parameter that has one. Called with groups, before placement."""

    def refuse_plugins(self, run: Run, model: Model) -> None:
        """Raise UsageError if a plugin cannot build several optimizers."""

    def refuse(self, run: Run, model: Model) -> None:
        """Raise UsageError if the layout has no such updates. Optimizer states are sharded by now."""

    def optimizer(self, run: Run, model: Model, pieces: list[Piece], groups: "Groups | None") -> Optimizer:
        """The optimizer of all pieces. Collective with groups; without, tensors may have no memory."""

    def num_bytes(self, optimizer: Optimizer) -> Mapping[str, int]:
        """What `measure_bytes` counts otherwise than tensors on the device: kinds of bytes, 0 to omit one."""

    def stepper(self, run: Run, model: Model, pieces: list[Piece], optimizer: Optimizer, stepper: Stepper) -> Stepper:
        """The stepper, or one around it that computes the entries which the plan recalls."""


def updates_of(run: Run, model: Model) -> Updates | None:
    """The installed class; None if the run needs none. UsageError if it does and none is installed."""
    settings = [f"optimizer.{name}" for name in ("groups", "average", "offload") if getattr(run.config, name)]
    if any(one.parameter.widths for one in model.placements.values() if one.parameter.trainable):
        settings.append("a base model of other widths")
    if model.plan.recalled:
        settings.append("entries that the first weights compute")
    if not settings:
        return None
    found: Updates = needed("updates", listed(settings), "mplug-updates")
    return found
