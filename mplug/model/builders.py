"""The plugin that builds the optimizer of a group of parameters, and its hooks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mplug.config.host_sections import ParameterGroup

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run

HOOK = "build_optimizer"


def builder(run: "Run", group: ParameterGroup | None) -> str:
    """The label of the plugin that builds the optimizer of a group, or of the parameters without a group (None)."""
    if group is not None and group.optimizer is not None:
        return group.optimizer.label
    (label,) = run.hooks.implementers(HOOK)
    return label


def builder_of(run: "Run", model: "Model", name: str) -> str:
    """The label of the plugin that builds the optimizer of a parameter."""
    number = model.groups.get(name, -1)
    return builder(run, run.config.groups[number] if number >= 0 else None)


def hook_of(run: "Run", group: ParameterGroup | None, hook: str) -> Callable[..., object]:
    """A hook, which at most one plugin answers, of the plugin that builds the optimizer of a group.

    It returns None if the plugin does not have it.
    """
    if group is not None and group.optimizer is not None:
        return partial(group.optimizer.call, hook)
    found: Callable[..., object] = getattr(run.hooks.call, hook)
    return found
