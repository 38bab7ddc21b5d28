"""The plugin that builds the optimizer of a group of parameters, and its hooks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mplug.config.host_sections import ParameterGroup
from mplug.contracts.optimizer import Optimizer, Piece
from mplug.model.assembler import Assembler
from mplug.model.single_optimizer import checked

if TYPE_CHECKING:
    from mplug.run.run import Run


def builder(run: "Run", group: ParameterGroup | None) -> str:
    """The label of the plugin that builds the optimizer of a group, or of the parameters without a group (None)."""
    if group is not None and group.optimizer is not None:
        return group.optimizer.label
    (label,) = run.hooks.implementers("build_optimizer")
    return label


def hook_of(run: "Run", group: ParameterGroup | None, hook: str) -> Callable[..., object]:
    """A hook, which at most one plugin answers, of the plugin that builds the optimizer of a group.

    It returns None if the plugin does not have it.
    """
    if group is not None and group.optimizer is not None:
        return partial(group.optimizer.call, hook)
    found: Callable[..., object] = getattr(run.hooks.call, hook)
    return found


def optimizer_of(run: "Run", pieces: list[Piece], assembler: Assembler, group: ParameterGroup | None) -> Optimizer:
    """What the plugin of a group builds of its pieces alone; PluginError if it is no optimizer."""
    optimizer = hook_of(run, group, "build_optimizer")(run=run, pieces=pieces, assembler=assembler)
    return checked(optimizer, builder(run, group))
