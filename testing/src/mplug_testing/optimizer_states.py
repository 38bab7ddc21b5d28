"""What the suite for optimizers requires of their state: checkpoints can hold it, and skipped steps leave it."""

import math

from mplug_testing.suite import require, smoke
from mplug_testing.weights import WeightSuite


class StateChecks(WeightSuite):
    """The part of `OptimizerSuite` about the state of pieces."""

    @smoke
    def test_a_skipped_step_changes_nothing(self) -> None:
        """If `skip` is 1, no bit of weights or state changes, whatever the gradients are."""
        import mplug_testing.dense as dense

        for factor in (1.0, float("nan"), float("inf")):
            bench = self._bench()
            bench.step(1)
            before = bench.snapshot()
            bench.step(2, dense.times(factor), skip=1.0, scale=factor)
            changed = dense.other_bits(before, bench.snapshot())
            gradients = "" if factor == 1 else f" with {factor} gradients"
            require(not changed, f"a skipped step{gradients} changes {changed}; change nothing if scalars.skip is 1")

    @smoke
    def test_a_skipped_step_is_not_remembered(self) -> None:
        """The steps after a skipped step give the same result as without it."""
        import mplug_testing.dense as dense

        one, other = self._bench(), self._bench()
        one.step(1)
        one.step(7, skip=1.0)
        one.step(2)
        other.step(1)
        other.step(2)
        changed = dense.other_bits(one.masters(), other.masters())
        require(not changed, f"a skipped step changes the bits of {changed} in the next step; it must have no effect")

    # State.

    @smoke
    def test_state_is_what_checkpoints_can_hold(self) -> None:
        """State consists of scalars, tensors of the piece's shape, and `mplug.ShapedState`s with parts that fit.

        The name 'weight' is reserved for the weight itself.
        """
        import torch

        from mplug.contracts.optimizer import ShapedState, tensors_of

        bench = self._bench()
        for piece, name, held in ((p, n, s) for p in bench.pieces for n, s in bench.optimizer.state(p).items()):
            state = f"the state '{name}' of '{piece.name}'"
            require(isinstance(held, torch.Tensor | ShapedState), f"{state} is no tensor: {held!r}")
            require(name != "weight", f"{state} has the name that checkpoints give to the weight; rename it")
            for tensor in tensors_of({name: held}).values():
                require(not tensor.requires_grad, f"{state} requires a gradient; it must not")
            if isinstance(held, ShapedState):
                numel = sum(part.numel() for part in held.parts.values())
                require(held.writes, f"{state} is written by no rank; the only rank must write it")
                require(numel == math.prod(held.shape), f"{state} has {numel} elements in parts of {held.shape}")
                continue
            require(
                held.shape in ((), piece.master.shape),
                f"{state} has shape {tuple(held.shape)}; it must have the piece's shape {tuple(piece.master.shape)}, "
                f"or (), or be a mplug.ShapedState",
            )

    @smoke
    def test_state_is_live(self) -> None:
        """Tensors that `state` returned show every later step, so that loading a checkpoint can copy into them."""
        import torch

        bench = self._bench()
        bench.step(1)
        held = list(bench.states())
        bench.step(2)
        for (piece, name, tensor), (_, _, now) in zip(held, bench.states(), strict=True):
            live = torch.equal(tensor, now)
            require(live, f"the state '{name}' of '{piece.name}' is a copy; return the tensor that later steps update")

    @smoke
    def test_copied_state_continues_to_the_bit(self) -> None:
        """The next step depends only on weights, state and the step's inputs."""
        import mplug_testing.dense as dense

        one, other = self._bench(), self._bench()
        one.step(1)
        one.step(2)
        for piece, other_piece in zip(other.pieces, one.pieces, strict=True):
            piece.master.copy_(other_piece.master)
        for (_, _, empty), (_, _, saved) in zip(other.states(), one.states(), strict=True):
            empty.copy_(saved)
        one.step(3)
        other.step(3)
        changed = dense.other_bits(one.snapshot(), other.snapshot())
        require(
            not changed,
            f"a step from copied state gives {changed} other bits; a step must depend only on weights, state and the "
            f"step's inputs",
        )
