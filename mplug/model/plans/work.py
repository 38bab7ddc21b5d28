"""Collects what the FLOPs of a model belong to, from what its modules state.

A module states its work by a method `plan_work()`, which returns its steps in order (`mplug.Step`). A module without
this method passes its input to its submodules in the order in which they are registered, and multiplies nothing itself.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from mplug.layout.plan import Unit
from mplug.layout.work import ActivationProduct, Branches, Flops, Step, WeightProduct, Work


def work_of_units(module: nn.Module, units: Iterable[Unit]) -> tuple[Work, ...]:
    """The work of all units of a model's module."""
    return tuple(work for unit in units for work in work_of(module.get_submodule(unit.name), unit.name))


def work_of(module: nn.Module, name: str = "") -> tuple[Work, ...]:
    """The work of a module that is a unit with this name, in order.

    Raises ValueError if a module states a step that it does not have.
    """
    return tuple(_Collector(name).of_module(module, name, ()))


def flops_of_work(found: Iterable[Work]) -> Flops:
    """The sum of the FLOPs."""
    return Flops.sum(work.flops for work in found)


class _Collector:
    """Collects the work of a unit. `after` are the names of what a step's input depends on."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def of_module(self, module: nn.Module, name: str, after: tuple[str, ...]) -> Iterator[Work]:
        stating: Callable[[], Step] | None = getattr(module, "plan_work", None)
        yield from self._of_step(in_order(module) if stating is None else stating(), module, name, after)

    def _of_step(self, step: Step, module: nn.Module, name: str, after: tuple[str, ...]) -> Iterator[Work]:
        if isinstance(step, str):
            part = _part(module, step)
            if isinstance(part, nn.Module):
                yield from self.of_module(part, _joined(name, step), after)
        elif isinstance(step, WeightProduct):
            _part(module, step.weight)
            yield Work(self.unit, _joined(name, step.weight), Flops(6 * step.elements, 0), True, after)
        elif isinstance(step, ActivationProduct):
            yield Work(self.unit, name, step.flops, False, (self.unit,) if step.after_unit else after)
        elif isinstance(step, Branches):
            for part in step.parts:
                yield from self._of_step(part, module, name, after)
        else:
            for part in step:
                yield from self._of_step(part, module, name, after)
                after = (*after, *_names(part, name))


def in_order(module: nn.Module) -> Step:
    """The steps of a module that states none: its own parameters, then its submodules."""
    own = (name for name, _ in module.named_parameters(recurse=False))
    return (*own, *(name for name, _ in module.named_children()))


def _part(module: nn.Module, name: str) -> object:
    """The submodule or parameter that a step names."""
    found: object = module
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    if not isinstance(found, nn.Module | nn.Parameter):
        raise ValueError(
            f"{type(module).__name__}.plan_work names '{name}', which is no submodule and no parameter of the module"
        )
    return found


def _names(step: Step, name: str) -> tuple[str, ...]:
    """The names of the modules and parameters that a step computes with."""
    if isinstance(step, str):
        return (_joined(name, step),)
    if isinstance(step, WeightProduct):
        return (_joined(name, step.weight),)
    if isinstance(step, ActivationProduct):
        return ()
    return tuple(one for part in (step.parts if isinstance(step, Branches) else step) for one in _names(part, name))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
