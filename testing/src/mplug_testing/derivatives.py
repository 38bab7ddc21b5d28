"""Compares the gradients of a model with differences of its loss, in fp64, along directions.

The loss is the model's own, plus the auxiliary losses that enter backward only (`mplug_nn.add_auxiliary`). For a
direction d the central difference (L(w + e d) - L(w - e d)) / 2e must be the inner product of the gradient and d.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from mplug.layout.names import role_of
from mplug.layout.plan import Unit
from mplug.model.units import run_units
from mplug_nn import statistics
from mplug_testing.model_checks import Trial
from mplug_testing.suite import Fault, require

STEPS = (1e-5, 1e-6, 1e-7)
"""Lengths of a step along a direction. One of them must agree: a step may cross a point where the loss has a kink."""
TOLERANCE = 1e-5
"""Maximum difference relative to the largest possible inner product of gradient and direction."""

Tensors = Mapping[str, Tensor]


@contextmanager
def auxiliary_losses() -> Iterator[list[Tensor]]:
    """In the block, the list holds the auxiliary losses of the last forward pass, each times its scale."""
    original, seen = statistics.add_auxiliary, list[Tensor]()

    def noted(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        seen.append(loss.detach() * scale)
        return original(x, loss, scale)

    with ExitStack() as stack:
        for module in [one for one in list(sys.modules.values()) if _held(one) is original]:
            stack.enter_context(mock.patch.object(module, "add_auxiliary", noted))
        yield seen


def _held(module: object) -> object:
    """What a module has under the name; `sys.modules` may also hold None and objects without a dictionary."""
    return getattr(module, "__dict__", {}).get("add_auxiliary")


def require_gradients_of_the_loss(trial: Trial) -> None:
    """Raise Fault unless the gradients of the parameters of each unit, and of all, are differences of the loss."""
    trial.shake()
    batch = trial.batches[0]
    gradients = trial.gradients([batch])
    parameters = {name: one for name, one in trial.model.parameters().items() if name in gradients}
    trial.model.module.train()
    check = _Differences(lambda: trial.loss(batch)[0], _buffers(trial))
    groups = {f"the parameters of unit '{unit.name}'": unit.name for unit in trial.model.plan.units}
    for what, unit in {"all parameters": "", **groups}.items():
        names = [name for name in parameters if not unit or name.startswith(f"{unit}.")]
        if names:
            check.require({name: parameters[name] for name in names}, gradients, f"the gradient of {what}")


def require_gradients_of_inputs(trial: Trial) -> None:
    """Raise Fault unless backward gives a unit's inputs the differences of its outputs; for one unit of each role."""
    trial.shake()
    trial.model.module.train()
    values, seen = dict(trial.batches[0]), set[str]()
    for unit in trial.model.plan.units:
        if role_of(unit.name) not in seen:
            seen.add(role_of(unit.name))
            _require_inputs_of(trial, unit, values)
        with torch.no_grad():
            values = run_units(trial.model.module, [unit], values)


def _require_inputs_of(trial: Trial, unit: Unit, values: Tensors) -> None:
    names = [name for name in unit.inputs if values[name].is_floating_point()]
    leaves = {name: values[name].detach().clone().requires_grad_() for name in names}

    def weighted() -> Tensor:
        made = run_units(trial.model.module, [unit], {**values, **leaves})
        outputs = [made[name] for name in unit.outputs if made[name].is_floating_point()]
        return torch.stack([(output * _weights(output)).sum() for output in outputs]).sum()

    if not leaves:
        return
    trial.model.sinks.begin_step()
    weighted().backward()
    gradients = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()}
    what = f"the gradient that unit '{unit.name}' gives its inputs"
    _Differences(weighted, _buffers(trial)).require(leaves, gradients, what)


def _buffers(trial: Trial) -> list[Tensor]:
    return list(trial.model.module.buffers())


class _Differences:
    """Central differences of a function that reads tensors. The buffers have the same values before every call."""

    def __init__(self, function: Callable[[], Tensor], buffers: Sequence[Tensor]) -> None:
        self.function = function
        self.buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self.generator = torch.Generator().manual_seed(3)

    def require(self, leaves: Tensors, gradients: Tensors, what: str) -> None:
        """Raise Fault unless the gradients agree with the differences along a direction that moves every tensor."""
        direction = {name: self._direction(gradients[name]) for name in leaves}
        expected = sum(float((gradients[name].detach() * one).sum()) for name, one in direction.items())
        scale = sum(float(gradients[name].norm() * one.norm()) for name, one in direction.items())
        require(scale > 0, f"{what} is zero")
        found = []
        for step in STEPS:
            found.append(self._difference(leaves, direction, step))
            if abs(found[-1] - expected) <= TOLERANCE * scale:
                return
        nearest = min(found, key=lambda one: abs(one - expected))
        raise Fault(
            f"{what} is not the derivative of the loss: along a direction the loss changes by {nearest:.8g} per unit, "
            f"and the gradient states {expected:.8g} (differences in fp64); does a part of the forward pass detach a "
            f"tensor, or does a backward of your own leave a term out?"
        )

    def _direction(self, gradient: Tensor) -> Tensor:
        """Half along the gradient, which shows a missing part best, and half at random."""
        drawn = torch.randn(gradient.shape, generator=self.generator, dtype=torch.float64)
        direction: Tensor = gradient / gradient.norm().clamp(min=1e-30) + drawn / drawn.norm().clamp(min=1e-30)
        return direction

    def _difference(self, leaves: Tensors, direction: Tensors, step: float) -> float:
        values = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        sums = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, leaf in leaves.items():
                    leaf.copy_(values[name] + sign * step * direction[name])
            sums.append(self._value())
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(values[name])
        return (sums[0] - sums[1]) / (2 * step)

    def _value(self) -> float:
        """The function, plus the auxiliary losses; grad mode stays on, since they exist in training only."""
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
        with auxiliary_losses() as auxiliary:
            own = float(self.function().detach())
        return own + sum(float(loss) for loss in auxiliary)


def _weights(value: Tensor) -> Tensor:
    """Fixed weights that differ from element to element: the derivatives of a plain sum could cancel."""
    generator = torch.Generator().manual_seed(value.numel())
    return torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
