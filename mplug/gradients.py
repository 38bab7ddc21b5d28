"""Gradient sinks: where a parameter's gradient is summed over the micro batches of a step, in fp32.

A sink's buffer hangs on its parameter as `main_grad`. Linear layers add their weight gradient to it inside their own
backward; what autograd accumulates for any other parameter is moved there. Either way autograd's accumulation node of
the parameter runs exactly once a backward pass, after every contribution, and that is what a sink listens to.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Listener = Callable[["GradientSink"], None]


class GradientSink:
    """One parameter's gradient over a step. Listeners hear exactly once a step that it is final."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.buffer: Tensor = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        self.listeners: list[Listener] = []
        self.final = False
        self._last = False
        parameter.main_grad = self.buffer  # type: ignore[attr-defined]
        node: Any = parameter.view_as(parameter).grad_fn
        self._accumulation = node.next_functions[0][0]  # held here: its hook dies with it
        self._accumulation.register_hook(self._contributed)

    def begin_step(self) -> None:
        """Forget the last step's gradient."""
        self.buffer.zero_()
        self.final = self._last = False

    def expect_last(self) -> None:
        """The next backward pass is the step's last."""
        self._last = True

    def finish(self) -> None:
        """Announce the gradient as final, if it was not yet (a parameter that took no part)."""
        if not self.final:
            self.final = True
            for listener in self.listeners:
                listener(self)

    def _contributed(self, *_: object) -> None:
        if self.parameter.grad is not None:
            self.buffer.add_(self.parameter.grad)
            self.parameter.grad = None
        if self._last:
            self.finish()


class Sinks(Mapping[str, GradientSink]):
    """The sinks of all of a rank's parameters, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._sinks = {name: GradientSink(name, p) for name, p in parameters.items() if p.requires_grad}

    def __getitem__(self, name: str) -> GradientSink:
        return self._sinks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for sink in self.values():
            sink.begin_step()

    def expect_last(self) -> None:
        """The next backward pass is the step's last: its contributions make gradients final."""
        for sink in self.values():
            sink.expect_last()

    def finish(self) -> None:
        """Announce what is not final yet."""
        for sink in self.values():
            sink.finish()
