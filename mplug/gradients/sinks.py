"""Gradient sinks: each sums a parameter's gradient over the micro batches of a step, in fp32.

If a step has one micro batch, nothing is summed, and the buffers may have the weights' precision (`gradient_dtype` in
build.py decides).

A sink's buffer is the attribute `main_grad` of its parameter. Linear layers add their weight gradient to it inside
their own backward. For any other parameter, the sink moves the gradient that autograd accumulates into the buffer. In
both cases autograd's accumulation node of the parameter runs exactly once per backward pass, after every contribution;
the sink has a hook on that node.

No pass over memory zeroes the buffers: the first contribution of a step overwrites the values of the last step. The
CPU tensor `main_grad_stale`, next to the buffer, says whether that contribution is still missing. Code that adds to
`main_grad` outside of a linear layer's gemm or an embedding's look-up must use `add_product` or `add_rows` of
`mplug.tensors.sink`, or call its `zero_if_stale` first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Listener = Callable[["GradientSink"], None]


class GradientSink:
    """One parameter's gradient over a step: `name`, `parameter`, and the `buffer` in which it is summed.

    `stale`, a boolean tensor on the CPU, says that the buffer has no contribution of this step yet. `owed` is the
    number of contributions that follow after their backward passes: until then, the gradient is not final. `passes`
    is the number of backward passes of the step that are still to come, if the stepper counts them.

    A strategy registers callbacks by appending functions of the sink to one of two lists. The sink calls each of its
    `listeners` exactly once per step, when the buffer is final on this rank. It calls each function in `passed` after
    every backward pass, when the buffer holds everything that the pass adds; in the step's `last` pass, after
    `listeners`.
    """

    def __init__(self, name: str, parameter: nn.Parameter, buffer: Tensor) -> None:
        self.name, self.parameter, self.buffer = name, parameter, buffer
        self.listeners: list[Listener] = []
        self.passed: list[Listener] = []
        self.stale = torch.zeros((), dtype=torch.bool, device="cpu")
        self.final = self.last = False
        self.owed = 0
        self.passes: int | None = None
        parameter.main_grad, parameter.main_grad_stale = self.buffer, self.stale  # type: ignore[attr-defined]
        node: Any = parameter.view_as(parameter).grad_fn
        self._accumulation = node.next_functions[0][0]  # a reference, because the hook dies with the node
        self._accumulation.register_hook(self._contributed)

    def begin_step(self) -> None:
        """Mark the buffer as stale and not final."""
        self.stale.fill_(True)
        self.final = self.last = False
        self.owed = 0
        self.passes = None

    def expect_passes(self, number: int) -> None:
        """Declare that `number` more backward passes of this step contribute; call `begin_pass` before each of them."""
        self.passes = number

    def begin_pass(self) -> None:
        """Declare that the next backward pass contributes. The gradient becomes final in the last counted one.

        Raises RuntimeError if the declared number of passes is exceeded.
        """
        if not self.passes:
            raise RuntimeError(f"a backward pass contributes to the gradient of '{self.name}' after its last one")
        self.passes -= 1
        self.last = self.passes == 0

    def expect_last(self) -> None:
        """Declare that the next backward pass is the step's last."""
        self.last = True

    def finish(self) -> None:
        """Announce the gradient as final, unless that has happened; an unused parameter's buffer becomes zero.

        Raises RuntimeError if a declared backward pass or a postponed contribution is missing.
        """
        if self.owed:
            raise RuntimeError(f"the gradient of '{self.name}' is not complete: {self.owed} contributions are missing")
        if self.passes:
            raise RuntimeError(f"the gradient of '{self.name}' is not complete: {self.passes} passes are missing")
        if not self.final:
            if self.stale:
                self.buffer.zero_()
                self.stale.fill_(False)
            self.final = True
            for listener in self.listeners:
                listener(self)

    def contribute(self, gradient: Tensor) -> None:
        """Add the gradient of a whole backward pass, in the buffer's shape; call it once per backward pass.

        A strategy that gathers weights needs this, because autograd never sees the sink's parameter. It sums the
        gradient over the ranks that gather, and contributes this rank's part. As long as the sink is stale, the
        strategy may use the buffer's memory for other values. If it has computed the gradient there, it passes the
        buffer itself as `gradient`.
        """
        if self.stale:
            self.buffer.copy_(gradient)
        else:
            self.buffer.add_(gradient)
        self.stale.fill_(False)
        if self.last and not self.owed:
            self.finish()

    def postpone(self) -> None:
        """Declare that a contribution of the next backward pass follows after the pass (`settle`)."""
        self.owed += 1

    def settle(self) -> None:
        """Announce that a postponed contribution is in the buffer."""
        self.owed -= 1
        self._end_pass()

    def _contributed(self, *_: object) -> None:
        if self.parameter.grad is not None:
            gradient, self.parameter.grad = self.parameter.grad, None
            self.contribute(gradient)
        self._end_pass()

    def _end_pass(self) -> None:
        if self.owed:
            return
        if self.last:
            self.finish()
        for listener in self.passed:
            listener(self)


class Sinks(Mapping[str, GradientSink]):
    """The sinks of all trained parameters of a rank, by name.

    One tensor, the arena, holds the buffers in the reverse of the parameters' order. Backward makes gradients final in
    about this order, so a strategy can reduce neighbours together. `families` maps each parameter to its
    `Placement.data_axes`. Gradients with the same axes are reduced over the same ranks and form a family; each family
    occupies a contiguous part of the arena. A parameter with an entry in `buffers` uses that buffer, outside the arena.

    A strategy that sums gradients over mesh axes by listening adds the axes to `reduced_over`, and appends to
    `when_finished` a function that waits for its sums. Sums are in place, so only one strategy of a run may sum a
    parameter's gradient: a later strategy leaves out the parameters that have one of their data axes in `reduced_over`.
    The host sums all other partial gradients, by placement.

    If the rank has several `chunks`, a backward pass runs one of them, so a stepper must declare its passes by
    `expect_passes` and `begin_pass`; otherwise it calls `expect_last` before the last one.

    A strategy that sums inexactly (it rounds or compresses) declares its axes by the hook `varies`; nothing else may
    then sum over them. A listener may change a buffer only by such a sum, because gathered or sharded gradients have
    been summed over some ranks before they are final.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        families: Mapping[str, tuple[str, ...]] | None = None,
        dtype: torch.dtype = torch.float32,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        buffers = buffers or {}
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.families = {name: (families or {}).get(name, ()) for name in trained}
        self._elsewhere = frozenset(buffers)
        end = sum(parameter.numel() for name, parameter in trained.items() if name not in buffers)
        device = next(iter(trained.values())).device if trained else None
        self.arena = torch.zeros(end, dtype=dtype, device=device)
        self.chunks = 1
        self.reduced_over: set[str] = set()
        self.when_finished: list[Callable[[], None]] = []
        self._sinks = {name: GradientSink(name, trained[name], buffer) for name, buffer in buffers.items()}
        for name in self._arranged()[::-1]:
            start, parameter = end - trained[name].numel(), trained[name]
            self._sinks[name] = GradientSink(name, parameter, self.arena[start:end].view_as(parameter))
            end = start

    def _arranged(self) -> list[str]:
        """The names in the arena's order: family by family, each in the reverse of the parameters' order."""
        backwards = [name for name in reversed(self.families) if name not in self._elsewhere]
        families = list(dict.fromkeys(self.families[name] for name in backwards))
        return sorted(backwards, key=lambda name: families.index(self.families[name]))

    def __getitem__(self, name: str) -> GradientSink:
        return self._sinks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.families)

    def __len__(self) -> int:
        return len(self._sinks)

    def stretches(self, num_bytes: int) -> Iterator[tuple[list[GradientSink], Tensor]]:
        """Cut the arena into stretches of at least `num_bytes`: (neighbouring sinks, the tensor of their buffers).

        All sinks of a stretch belong to one family. The last stretch of a family may be shorter.
        """
        held: list[GradientSink] = []
        start = stop = 0
        for name, following in pairwise([*self._arranged(), None]):
            assert name is not None
            held.append(self[name])
            stop += self[name].buffer.numel()
            ends = following is None or self.families[following] != self.families[name]
            if ends or (stop - start) * self.arena.itemsize >= num_bytes:
                yield held, self.arena[start:stop]
                held, start = [], stop

    def begin_step(self) -> None:
        """Mark all buffers as stale and not final."""
        for sink in self.values():
            sink.begin_step()

    def expect_passes(self, numbers: Mapping[str, int]) -> None:
        """Declare how many backward passes of this step contribute to each gradient, by name.

        A tied parameter is in several chunks, and its gradient is final after the last pass of the last one.
        """
        for name, number in numbers.items():
            self[name].expect_passes(number)

    def begin_pass(self, names: Iterable[str]) -> None:
        """Declare that the next backward pass contributes to these gradients, which `expect_passes` has counted."""
        for name in names:
            self[name].begin_pass()

    def expect_last(self) -> None:
        """Declare that the next backward pass is the step's last: its contributions make gradients final.

        Raises RuntimeError if passes run parts of the rank's units: then no pass is the last one of all gradients.
        """
        if self.chunks > 1:
            raise RuntimeError(
                f"this rank has {self.chunks} chunks of units, and a backward pass runs one of them; declare the "
                f"passes by expect_passes and begin_pass"
            )
        for sink in self.values():
            sink.expect_last()

    def finish(self) -> None:
        """Announce the remaining gradients as final, then wait for the sums of the listeners."""
        for sink in self.values():
            sink.finish()
        for wait in self.when_finished:
            wait()
