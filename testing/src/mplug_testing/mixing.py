"""Checks whether a model declares which tokens it mixes: each unit runs again with one token of one sample changed.

The check replaces attention by a core that computes each position separately, gives experts with a capacity almost no
room, and lets modules that declare an axis repeat their earlier output. If a change still travels along that axis, in a
unit's outputs or in the gradients of its inputs, then this mixing is undeclared.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mplug.errors import listed
from mplug.layout.names import role_of
from mplug.layout.plan import Unit
from mplug.model.model import Model
from mplug.model.slots.fill import sites
from mplug.model.units import run_units
from mplug_invariance import INDEX_OF, NAME, Statement, statements
from mplug_testing.model_checks import Trial
from mplug_testing.suite import Fault

TOLERANCE = 1e-9
"""Maximum change, relative to the largest value, that counts as rounding in fp64."""
NO_ROOM = 0.25
"""A capacity factor with which most experts are full."""

Values = dict[str, Tensor]


def require_declared_mixing(trial: Trial) -> None:
    """Raise Fault if a unit mixes an axis that none of its modules declares; SkipTest if modules declare nothing."""
    model, declarations = trial.model, statements(trial.model)
    _replace_slots(model)
    for parameter in model.parameters().values():
        parameter.requires_grad_(False)
    for training in (True, False):
        model.module.train(training)
        for unit, values in _inputs_of_units(trial):
            inside = [each for each in declarations if each.name == unit.name or each.name.startswith(f"{unit.name}.")]
            for axis in _axes_of_tokens(model, unit, values):
                mixed = _Probe(model, unit, values, axis, inside).mixes()
                if mixed:
                    raise Fault(_sentence(unit, axis, inside, training))
    undeclared = list(dict.fromkeys(each.label for each in declarations if each.axes is None))
    if undeclared:
        raise SkipTest(
            f"{listed(undeclared)} declare no mixing, and this test observed none; add `{NAME} = frozenset()` to the "
            f"classes, or layouts that divide the sequence refuse them"
        )


def _replace_slots(model: Model) -> None:
    for site in sites(model.module):
        if site.slot == "Attention.core":
            site.module.core = _position_wise
    for part in model.module.modules():
        if getattr(part, "capacity_factor", None) is not None:
            part.capacity_factor = NO_ROOM  # type: ignore[assignment]


def _position_wise(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """q [B, S, H, K], k and v [B, T, G, K] -> each position's value, weighted by its own query and key."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    if k.shape[1] != q.shape[1]:  # keys of another sequence, all of which a query sees
        k, v = (x.mean(dim=1, keepdim=True).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return v * (q * k).mean(-1, keepdim=True).tanh()


def _ones_along(axis: str, values: Tensor, over: tuple[str, ...]) -> Tensor:
    """The content of `Router.summed` here: a sum along `axis` belongs to the slot, so ones replace it."""
    return torch.ones_like(values) if axis in over else values


def _each_position(function: Callable[..., Tensor], *tensors: Tensor, **_: Any) -> Tensor:
    """The content of `MixtureOfExperts.over_sequences` here: what positions share belongs to the slot."""
    positions = range(tensors[0].shape[1])
    return torch.cat([function(*(x[:, at : at + 1] for x in tensors)) for at in positions], dim=1)


def _inputs_of_units(trial: Trial) -> Iterator[tuple[Unit, Values]]:
    """Every unit of the model, with all values that exist when it is called."""
    values = dict(trial.batches[0])
    for unit in trial.model.plan.units:
        yield unit, values
        with torch.no_grad():
            values = run_units(trial.model.module, [unit], values)


def _axes_of_tokens(model: Model, unit: Unit, values: Values) -> list[str]:
    """The axes of a unit's inputs that batch entries have too. Axes that only activations have are features.

    The rows of a stream that a unit of another sequence takes are not its own: it may use all of them.
    """
    foreign = {axis for axis in model.plan.streams if axis != unit.sequence}
    entries = {axis for axes in model.plan.context.values() for axis in axes} - foreign
    given = [_axes_of(model, name) for name in _changeable(unit, values)]
    return [axis for axis in dict.fromkeys(axis for axes in given for axis in axes) if axis in entries]


def _axes_of(model: Model, name: str) -> tuple[str, ...]:
    return model.plan.activations.get(name) or model.plan.context.get(name, ())


def _changeable(unit: Unit, values: Values) -> list[str]:
    """The inputs of a unit that differ from token to token: floating-point inputs, and the tokens."""
    given = (*unit.inputs, *(name for name in unit.optional if name in values))
    return [name for name in given if values[name].is_floating_point() or name == "tokens"]


def _sentence(unit: Unit, axis: str, inside: list[Statement], training: bool) -> str:
    undeclared = listed(dict.fromkeys(each.kind for each in inside if each.axes is None))
    index, when = INDEX_OF.get(axis, f"index of the {axis}"), "" if training else " in evaluation"
    return (
        f"unit '{role_of(unit.name)}' mixes the {axis}{when}: the input at one {index} changes the output at another, "
        f"outside of slots and of modules that declare it (modules without a declaration: {undeclared}); add "
        f"`{NAME} = frozenset({{'{axis}'}})` to the class that mixes, or layouts that divide the {axis} compute wrong "
        f"results"
    )


@dataclass
class _Probe:
    """Determines whether a unit mixes one named axis outside the modules that declare it."""

    model: Model
    unit: Unit
    values: Values
    axis: str
    inside: list[Statement]

    def mixes(self) -> bool:
        """Whether a change at one index of the axis changes a value at another index."""
        declared = [statement for statement in self.inside if self.axis in (statement.axes or ())]
        for site in sites(self.model.module):
            if site.slot == "Router.summed":
                site.module.summed = partial(_ones_along, self.axis)
            if site.slot == "MixtureOfExperts.over_sequences":
                site.module.over_sequences = _each_position if self.axis == "sequence" else site.declared.default
        if any(one.name == self.unit.name for one in declared):
            return False
        with _repeating([one.module for one in declared]) as repeat:
            with torch.no_grad():
                self._run(self.values)
            if not repeat():  # a module is called by another method than forward: its mixing cannot be separated
                return False
            before = self._seen(self.values)
            places = enumerate(self._places())
            return any(self._travels(at, before, self._seen(self._changed(at, number))) for number, at in places)

    def _places(self) -> Iterator[dict[str, int]]:
        """The places of changes: an index for every axis of tokens."""
        lengths = {
            axis: length
            for name in _changeable(self.unit, self.values)
            for axis, length in zip(_axes_of(self.model, name), self.values[name].shape, strict=True)
        }
        for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            yield {axis: round(part * (length - 1)) for axis, length in lengths.items()}

    def _changed(self, at: dict[str, int], number: int) -> Values:
        """The inputs that have the axis, with other values at one index of each axis of tokens."""
        generator = torch.Generator().manual_seed(number)
        tokens = set(_axes_of_tokens(self.model, self.unit, self.values))
        changed = dict(self.values)
        for name in _changeable(self.unit, self.values):
            if self.axis not in _axes_of(self.model, name):
                continue
            value = self.values[name].clone()
            where = tuple(at[axis] if axis in tokens else slice(None) for axis in _axes_of(self.model, name))
            if value.is_floating_point():
                value[where] += 3 * torch.randn(value[where].shape, generator=generator, dtype=value.dtype)
            else:
                value[where] = (value[where] + 1) % (value.max() + 1)
            changed[name] = value
        return changed

    def _run(self, values: Values) -> Values:
        return run_units(self.model.module, [self.unit], values)

    def _seen(self, values: Values) -> Values:
        """The unit's outputs, and the gradients of its inputs, by distinct names."""
        inputs = [name for name in _changeable(self.unit, values) if values[name].is_floating_point()]
        given = {**values, **{name: values[name].detach().requires_grad_() for name in inputs}}
        made = self._run(given)
        outputs = {name: made[name] for name in self.unit.outputs}
        seen = {f"output {name}": value.detach() for name, value in outputs.items()}
        sums = [(value * _weights(value)).sum() for value in outputs.values() if value.requires_grad]
        if sums and inputs:
            gradients = torch.autograd.grad(
                torch.stack(sums).sum(), [given[name] for name in inputs], allow_unused=True
            )
            found = zip(inputs, gradients, strict=True)
            seen |= {f"gradient {name}": gradient for name, gradient in found if gradient is not None}
        return seen

    def _travels(self, at: dict[str, int], before: Values, after: Values) -> bool:
        """Whether a value has changed at another index of the axis than the changed one."""
        for name, value in before.items():
            axes = _axes_of(self.model, name.partition(" ")[2])
            if self.axis not in axes or value.dim() != len(axes):
                continue
            dim = axes.index(self.axis)
            other_indices = [index for index in range(value.shape[dim]) if index != at[self.axis]]
            moved = (after[name] - value).abs().index_select(dim, torch.tensor(other_indices, dtype=torch.int64))
            if bool((moved > TOLERANCE * value.abs().max().clamp(min=1.0)).any()):
                return True
        return False


class _Repeated:
    """Replaces a module's forward: records its results, and later repeats them instead of computing."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        self.given: list[Any] = []
        self.repeats, self.calls = False, 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self.repeats:
            self.given.append(tree_map_only(Tensor, Tensor.detach, self.forward(*args, **named)))
            return self.given[-1]
        self.calls += 1
        return self.given[(self.calls - 1) % len(self.given)]


@contextmanager
def _repeating(modules: Iterable[nn.Module]) -> Iterator[Callable[[], bool]]:
    """In the block, modules record their results; a call of the yielded function makes them repeat these.

    The function returns whether every module has been called.
    """
    repeated = [_Repeated(module) for module in modules]

    def repeat() -> bool:
        for module in repeated:
            module.repeats = True
        return all(one.given for one in repeated)

    with ExitStack() as stack:
        for one in repeated:
            stack.callback(setattr, one.module, "forward", one.forward)
            one.module.forward = one
        yield repeat


def _weights(value: Tensor) -> Tensor:
    """Fixed weights that differ from element to element: the gradients of a plain sum could cancel."""
    generator = torch.Generator().manual_seed(value.numel())
    return torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.dtype) + 0.5
