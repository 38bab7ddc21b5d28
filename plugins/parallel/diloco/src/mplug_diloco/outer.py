"""The outer step of DiLoCo (arXiv 2311.08105), around the optimizer of each worker.

Every worker updates its local weights l. At the steps that `Rounds` states, the workers average the difference g - l
of a fragment to the global weights g, and SGD with Nesterov momentum applies the mean to g as a gradient. `delay` steps
later, l becomes alpha l + (1 - alpha) g. The global weights have the new value from the beginning of the exchange on:
reading them waits for the exchange. So nothing of an exchange under way must be saved.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import Model, Optimizer, Piece, Run, ShapedState, StepScalars
from mplug_diloco.config import DiLoCoConfig
from mplug_diloco.rounds import Rounds, fragments_of
from mplug_diloco.wire import Mean

GLOBAL, MOMENTUM = "global", "outer_momentum"
"""The states of a piece that are equal on all workers."""


class OuterOptimizer(Optimizer):
    """An optimizer of the local weights, and the outer step. `weights` are the global ones."""

    weights = GLOBAL
    shared = frozenset((GLOBAL, MOMENTUM))

    def __init__(self, run: Run, model: Model, inner: Optimizer, pieces: list[Piece], config: DiLoCoConfig) -> None:
        self.run, self.inner, self.config = run, inner, config
        self.one_pass, self.low_precision_gradients = inner.one_pass, inner.low_precision_gradients
        self.rounds = Rounds(config.every, config.fragments, config.delay, run.config.trainer.steps)
        self.group = run.group("diloco", use="outer")
        of = fragments_of(model.plan, model.placements, config.fragments)
        by_name = {piece.name: piece for piece in pieces}
        names = [name for name in of if name in by_name]  # the order of the placements, on every rank
        self.fragments = [
            _Fragment([by_name[name] for name in names if of[name] == number], self.group)
            for number in range(config.fragments)
        ]
        self._fragment_of = of

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """The inner step, then the exchanges that are due. A step that is skipped skips no exchange."""
        step, config = self.run.step, self.config
        if step <= 1:
            for fragment in self.fragments:
                fragment.start()
        self.inner.step(scalars)
        begins, merges = self.rounds.begins(step), self.rounds.merges(step)
        for number in merges:
            self._merge(number)
        for number in begins:
            self.fragments[number].begin(self.run.device, config.wire)
        if config.delay == 0 or step == self.rounds.last:
            for number in begins:
                self._merge(number)

    def _merge(self, number: int) -> None:
        """Give the local weights of a fragment their part of the global ones."""
        self._settle(number)
        fragment = self.fragments[number]
        fragment.merge(self.config.alpha)
        if self.one_pass:  # the host writes no weights after the step
            fragment.write()

    def _settle(self, number: int) -> None:
        self.fragments[number].settle(self.config.lr, self.config.momentum)

    def states_moved(self) -> None:
        """Pass it on."""
        self.inner.states_moved()

    @torch.no_grad()
    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The live state of a piece: that of the inner optimizer, the global weights and the outer momentum."""
        number = self._fragment_of[piece.name]
        self._settle(number)
        return {**self.inner.state(piece), **self.fragments[number].states[piece.name]}


class _Fragment:
    """The pieces of a rank that are exchanged together; a rank may have none."""

    def __init__(self, pieces: list[Piece], group: ops.Group) -> None:
        self.pieces = pieces
        self.masters = [piece.master for piece in pieces]
        self.globals = [torch.zeros_like(master) for master in self.masters]
        self.momenta = [torch.zeros_like(master) for master in self.masters]
        self.states = {
            piece.name: {GLOBAL: weights, MOMENTUM: momentum}
            for piece, weights, momentum in zip(pieces, self.globals, self.momenta, strict=True)
        }
        items = [ops.Item(piece.name, tuple(piece.master.shape)) for piece in pieces]
        self.exchange = ops.Exchange("differences of workers", group, items)
        self._mean: Mean | None = None

    def start(self) -> None:
        """The weights with which the run begins are the first global ones."""
        if self.pieces:
            torch._foreach_copy_(self.globals, self.masters)

    def begin(self, device: str, wire: str) -> None:
        """Start to average the differences."""
        group = self.exchange.group
        if not self.pieces or group is None:
            return
        self.exchange.check()
        differences = torch._foreach_sub(self.globals, self.masters)
        flat = torch.cat([one.flatten() for one in differences]).to(device)
        self._mean = Mean(flat, wire, group)

    def settle(self, lr: float, momentum: float) -> None:
        """If the differences are under way, wait for them, and take the outer step (Nesterov, as torch.optim.SGD)."""
        if self._mean is None:
            return
        mean, self._mean = self._mean.wait(), None
        sizes = [master.numel() for master in self.masters]
        parts = mean.to(self.masters[0].device).split(sizes)
        gradients = [part.view_as(one) for part, one in zip(parts, self.masters, strict=True)]
        torch._foreach_mul_(self.momenta, momentum)
        torch._foreach_add_(self.momenta, gradients)
        torch._foreach_add_(gradients, self.momenta, alpha=momentum)
        torch._foreach_add_(self.globals, gradients, alpha=-lr)

    def merge(self, alpha: float) -> None:
        """Move the local weights to alpha local + (1 - alpha) global."""
        if not self.pieces:
            return
        if alpha == 0:
            torch._foreach_copy_(self.masters, self.globals)
            return
        torch._foreach_mul_(self.masters, alpha)
        torch._foreach_add_(self.masters, self.globals, alpha=1 - alpha)

    def write(self) -> None:
        """Round the masters into the weights that the model computes with."""
        pairs = [(piece.weight, piece.master) for piece in self.pieces if piece.weight is not None]
        if pairs:
            torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])
