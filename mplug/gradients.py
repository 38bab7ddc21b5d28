"""Gradient sinks: where a parameter's gradient is summed over the micro batches of a step, in fp32.

Where nothing is summed, because a step has one micro batch, they may have the weights' precision (`gradient_dtype`).

A sink's buffer hangs on its parameter as `main_grad`. Linear layers add their weight gradient to it inside their own
backward; what autograd accumulates for any other parameter is moved there. Either way autograd's accumulation node of
the parameter runs exactly once a backward pass, after every contribution, and that is what a sink listens to.

No pass over memory zeroes buffers: a step's first contribution overwrites what the last step left. Whether it has come
yet is known on the host, by `main_grad_stale` beside the buffer. Who adds to `main_grad` in another way than by a
linear layer's gemm or a look-up does so by `mplug.nn.add_product` or `add_rows`, or calls `mplug.nn.zero_if_stale`
first.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Listener = Callable[["GradientSink"], None]


class GradientSink:
    """One parameter's gradient over a step: `name`, `parameter`, and the `buffer` in which it is summed.

    `stale`, a boolean on the CPU, says that nothing of this step is in the buffer yet. Append to `listeners` a function
    of the sink: it hears exactly once a step that the buffer is final on this rank. Those in `passed` hear of every
    backward pass, once all that it adds to the buffer is there, and after it is final if it is the step's `last`.
    """

    def __init__(self, name: str, parameter: nn.Parameter, buffer: Tensor) -> None:
        self.name, self.parameter, self.buffer = name, parameter, buffer
        self.listeners: list[Listener] = []
        self.passed: list[Listener] = []
        self.stale = torch.zeros((), dtype=torch.bool, device="cpu")
        self.final = self.last = False
        parameter.main_grad, parameter.main_grad_stale = self.buffer, self.stale  # type: ignore[attr-defined]
        node: Any = parameter.view_as(parameter).grad_fn
        self._accumulation = node.next_functions[0][0]  # held here: its hook dies with it
        self._accumulation.register_hook(self._contributed)

    def begin_step(self) -> None:
        """Forget the last step's gradient; nothing is final yet."""
        self.stale.fill_(True)
        self.final = self.last = False

    def expect_last(self) -> None:
        """The next backward pass is the step's last."""
        self.last = True

    def finish(self) -> None:
        """Announce the gradient as final, if it was not yet (a parameter that took no part)."""
        if not self.final:
            if self.stale:
                self.buffer.zero_()
                self.stale.fill_(False)
            self.final = True
            for listener in self.listeners:
                listener(self)

    def contribute(self, gradient: Tensor) -> None:
        """Add the gradient of a whole backward pass, of the buffer's shape: for whoever has it from elsewhere.

        Where weights are gathered, autograd never sees the parameter of a sink, and who has summed the gradient over
        the ranks that gather brings each its part, once a backward pass.
        """
        if self.stale:
            self.buffer.copy_(gradient)
        else:
            self.buffer.add_(gradient)
        self.stale.fill_(False)
        if self.last:
            self.finish()

    def _contributed(self, *_: object) -> None:
        if self.parameter.grad is not None:
            gradient, self.parameter.grad = self.parameter.grad, None
            self.contribute(gradient)
        elif self.last:
            self.finish()
        for listener in self.passed:
            listener(self)


class Sinks(Mapping[str, GradientSink]):
    """The sinks of all of a rank's parameters, by name.

    Their buffers lie in one arena, in the reverse of the parameters' order: about the order in which backward makes
    them final, so that neighbours can be reduced together. `families` says whose are reduced over the same ranks
    (`Placement.data_axes`): each family has a part of the arena to itself. Those that have a buffer in `buffers` keep
    it, and have none in the arena.

    Whoever sums gradients over mesh axes by listening names them in `reduced_over`, and appends to `when_finished` what
    must be waited for before gradients are read. Buffers are summed in place, so only one strategy of a run may sum a
    parameter's: whoever comes later leaves those alone of whose data axes one is named. What no one sums so, the host
    does by placement.

    A strategy whose sum is not the plain one (it rounds or compresses) declares its axes by the hook `varies`: no one
    else may then sum over them. A listener changes a buffer by such a sum and in no other way, because gradients that
    are gathered or divided have been summed over some ranks before they are final.
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
        """The arena in stretches of at least `num_bytes`: neighbouring sinks, and the tensor of their buffers.

        All of a stretch are of one family. The last of a family may be shorter.
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
        """Forget the last step's gradients."""
        for sink in self.values():
            sink.begin_step()

    def expect_last(self) -> None:
        """The next backward pass is the step's last: its contributions make gradients final."""
        for sink in self.values():
            sink.expect_last()

    def finish(self) -> None:
        """Announce what is not final yet, then wait for whoever listens."""
        for sink in self.values():
            sink.finish()
        for wait in self.when_finished:
            wait()
