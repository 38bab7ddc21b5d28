"""One chunk of a rank: the passes of its micro batches, and the state that each keeps until its backward pass."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mplug import DefaultStepper, MicroBatch, Model
from mplug_pp.wire import Layout
from mplug_schedules import WeightGradients

Root = tuple[GradientEdge | None, Layout]
"""Where the backward pass of an output starts (None: it depends on no trained parameter), and its gradient's layout."""


@dataclass
class _Pass:
    """The state of a micro batch between its forward and its backward pass. It does not keep outputs."""

    inputs: list[Tensor]
    roots: list[Root]
    loss: Tensor | None
    postponed: Any = None


class Chunk:
    """Runs the passes of one chunk.

    Only activations that depend on a trained parameter have gradients, and integers never do. `takes` are the
    activations that enter the chunk, `gives` those that leave it (none leave the last chunk). `returned` and `awaited`
    flag those of them that depend on a trained parameter; for the last chunk, `awaited` flags the loss. A chunk without
    awaited gradients runs forward only.
    """

    def __init__(self, model: Model, default: DefaultStepper, number: int) -> None:
        self.model, self.default, self.number = model, default, number
        self.is_last = number + 1 == len(model.stages.units)
        self.takes = model.crossing(number)
        self.gives = () if self.is_last else model.crossing(number + 1)
        self.results = model.plan.results if self.is_last else self.gives
        before, after = model.learning(number), model.learning(number + 1)
        self.returned = [name in before for name in self.takes]
        self.awaited = [name in after for name in self.gives or ("loss",)]
        self.learns = any(self.awaited)
        self.trained = model.trained_in(number) if self.learns else ()
        self._later = WeightGradients(model, number) if self.learns and model.stages.backward == "split" else None
        self._which = (number,) if len(model.own_chunks) > 1 else ()  # a wrap of `model.run` need not know chunks
        self._passes: dict[int, _Pass] = {}
        self._postponed: dict[int, Any] = {}

    def forward(self, micro_batch: int, batch: MicroBatch, taken: list[Tensor], split: bool) -> dict[str, Tensor]:
        """Run a forward pass; `split` says that the backward pass will have two halves.

        Returns detached outputs by name; those of the last chunk are what the last unit returns.
        """
        trains = torch.is_grad_enabled()  # without gradients, a compiler would trace the first unit once more
        inputs = [
            tensor.requires_grad_(trains and learns and _has_gradient(tensor))
            for tensor, learns in zip(taken, self.returned, strict=True)
        ]
        entries = {**batch, **dict(zip(self.takes, inputs, strict=True))}
        with torch.set_grad_enabled(self.learns and trains):
            later = self._later.postponing(entries) if split and self._later is not None else nullcontext()
            with later as postponed:
                values = self.model.run(entries, *self._which)
        ends = [values[name] for name in self.gives or ("loss",)]
        if trains:
            loss = ends[0].detach() if self.is_last else None
            self._passes[micro_batch] = _Pass(inputs, self._roots(ends), loss, postponed)
        return {name: values[name].detach() for name in self.results}

    def _roots(self, ends: Iterable[Tensor]) -> list[Root]:
        return [
            (get_gradient_edge(end) if end.requires_grad else None, (end.dtype, tuple(end.shape)))
            for end, awaited in zip(ends, self.awaited, strict=True)
            if awaited and _has_gradient(end)
        ]

    def gradients_of(self, micro_batch: int) -> list[Layout]:
        """The dtypes and shapes of the gradients with which a backward pass starts."""
        return [layout for _, layout in self._passes[micro_batch].roots]

    def backward(self, micro_batch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Run a backward pass, or its first half, from the gradients of the outputs (none in the last chunk).

        Returns the gradients of the inputs that have one.
        """
        one = self._passes.pop(micro_batch)
        self.default.sinks.begin_pass(self.trained)
        if one.loss is not None:
            start = self.default.loss_gradient(one.loss)
            gradients = [torch.ones_like(one.loss) if start is None else start for _ in one.roots]
        starts = [(edge, grad) for (edge, _), grad in zip(one.roots, gradients, strict=True) if edge is not None]
        if starts:
            edges, upstream = zip(*starts, strict=True)
            with nullcontext() if one.postponed is None else one.postponed.backward():
                torch.autograd.backward(edges, upstream)
        if one.postponed is not None:
            self._postponed[micro_batch] = one.postponed
        inputs = [tensor for tensor in one.inputs if tensor.requires_grad]
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]

    def weight_gradients(self, micro_batch: int) -> None:
        """Run the second half of a backward pass."""
        postponed = self._postponed.pop(micro_batch, None)
        if postponed is not None:
            postponed.compute()


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
