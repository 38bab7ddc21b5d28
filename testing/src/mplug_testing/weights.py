"""Tests of the optimizer suite for low-precision weights: the host or the optimizer writes them after a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from mplug_testing.harness import tiny_run
from mplug_testing.suite import PluginSuite, refusals, require, smoke

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_testing.dense import Bench


class WeightSuite(PluginSuite):
    """The host writes low-precision weights, unless the optimizer states `one_pass`."""

    @smoke
    def test_it_updates_masters_in_place(self) -> None:
        """The model or the host reads the pieces' own tensors."""
        import torch

        bench = self._weighted()
        masters = [(piece.master, piece.master.clone()) for piece in bench.pieces]
        bench.step(1)
        for piece, (master, before) in zip(bench.pieces, masters, strict=True):
            moved = piece.master is master and not torch.equal(master, before)
            require(moved, f"it does not update the master of '{piece.name}' in place")

    @smoke
    def test_it_leaves_low_precision_weights_to_the_host(self) -> None:
        """Unless the optimizer states `one_pass`, the host rounds masters into weights after each step."""
        import torch

        bench = self._weighted()
        if _one_pass(bench):
            raise SkipTest(f"'{self.plugin}' sets one_pass, so its step writes them")
        before = [piece.master.bfloat16() for piece in bench.pieces]
        bench.step(1)
        for piece, weight in zip(bench.pieces, before, strict=True):
            require(
                piece.weight is not None and torch.equal(piece.weight, weight),
                f"it writes to the low-precision weight of '{piece.name}'; it must update the master only, or set "
                f"one_pass",
            )

    @smoke
    def test_one_pass_writes_weights(self) -> None:
        """If the optimizer states `one_pass`, the host does not write weights."""
        import torch

        bench = self._one_pass_bench()
        for number in (1, 2):
            bench.step(number)
            for piece in bench.pieces:
                written = piece.weight is not None and torch.equal(piece.weight, piece.master.bfloat16())
                require(written, f"it sets one_pass, and the weight of '{piece.name}' is not its rounded master")

    @smoke
    def test_one_pass_of_a_skipped_step_writes_no_weight(self) -> None:
        """If `skip` is 1, no bit of a weight changes, whatever the gradients are."""
        import mplug_testing.dense as dense

        for factor in (1.0, float("nan"), float("inf")):
            bench = self._one_pass_bench()
            weights = {piece.name: piece.weight for piece in bench.pieces if piece.weight is not None}
            for weight in weights.values():
                weight.zero_()  # so that it shows if a master is written
            bench.step(1, dense.times(factor), skip=1.0, scale=factor)
            step = "a skipped step" if factor == 1 else f"a skipped step with {factor} gradients"
            for name, weight in weights.items():
                require(not bool(weight.any()), f"{step} changes the low-precision weight of '{name}'")

    # Shared by the tests.

    def _run(self) -> "Run":
        return self.run_of(self.tiny())

    @classmethod
    def run_of(cls, settings: Mapping[str, Any]) -> "Run":
        """A prepared run on its device; SkipTest if this machine lacks the device."""
        from mplug.model.build import choose_device

        run = tiny_run(settings)
        with refusals("the device of this suite's runs", named_by_author=False):  # skips if this machine lacks it
            run.device = choose_device(run.config)
        return run

    def _bench(self) -> "Bench":
        import mplug_testing.dense as dense

        run = self._run()
        return dense.Bench(run, dense.make_pieces(run.device))

    def _weighted(self) -> "Bench":
        import mplug_testing.dense as dense

        run = self._run()
        return dense.Bench(run, dense.with_weights(dense.make_pieces(run.device)), "pieces with bf16 weights")

    def _one_pass_bench(self) -> "Bench":
        bench = self._weighted()
        if not _one_pass(bench):
            raise SkipTest(f"'{self.plugin}' does not set one_pass")
        return bench


def _one_pass(bench: "Bench") -> bool:
    return bench.optimizer.one_pass
