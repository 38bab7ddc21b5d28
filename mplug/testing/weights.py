"""What the suite of optimizers checks about low-precision weights after a step: whose they are."""

from typing import TYPE_CHECKING
from unittest import SkipTest

from mplug.testing.harness import tiny_run
from mplug.testing.suite import PluginSuite, refusals, require, smoke

if TYPE_CHECKING:
    from mplug.run import Run
    from mplug.testing.dense import Bench


class WeightSuite(PluginSuite):
    """They are the host's, unless the optimizer says `one_pass`."""

    @smoke
    def test_it_updates_masters_in_place(self) -> None:
        """The pieces' own tensors, which the model or the host reads."""
        import torch

        bench = self._weighted()
        masters = [(piece.master, piece.master.clone()) for piece in bench.pieces]
        bench.step(1)
        for piece, (master, before) in zip(bench.pieces, masters, strict=True):
            moved = piece.master is master and not torch.equal(master, before)
            require(moved, f"it does not update the master of '{piece.name}' in place")

    @smoke
    def test_it_leaves_low_precision_weights_to_the_host(self) -> None:
        """The host rounds masters into weights, once a step."""
        import torch

        bench = self._weighted()
        if _one_pass(bench):
            raise SkipTest(f"'{self.plugin}' says that its step writes them")
        before = [piece.master.bfloat16() for piece in bench.pieces]
        bench.step(1)
        for piece, weight in zip(bench.pieces, before, strict=True):
            require(
                piece.weight is not None and torch.equal(piece.weight, weight),
                f"it writes to the low-precision weight of '{piece.name}'; its master is what it updates, unless it "
                f"says one_pass",
            )

    @smoke
    def test_one_pass_writes_weights(self) -> None:
        """Where it says `one_pass`, the host does not."""
        import torch

        bench = self._that_says_one_pass()
        for number in (1, 2):
            bench.step(number)
            for piece in bench.pieces:
                written = piece.weight is not None and torch.equal(piece.weight, piece.master.bfloat16())
                require(written, f"it says one_pass, and the weight of '{piece.name}' is not its rounded master")

    @smoke
    def test_one_pass_of_a_skipped_step_writes_no_weight(self) -> None:
        """Where `skip` is 1, no bit of a weight changes, whatever the gradients are."""
        from mplug.testing import dense

        for factor in (1.0, float("nan"), float("inf")):
            bench = self._that_says_one_pass()
            weights = {piece.name: piece.weight for piece in bench.pieces if piece.weight is not None}
            for weight in weights.values():
                weight.zero_()  # so that it shows if a master is written
            bench.step(1, dense.times(factor), skip=1.0, scale=factor)
            what = "a skipped step" if factor == 1 else f"a skipped step with {factor} gradients"
            for name, weight in weights.items():
                require(not bool(weight.any()), f"{what} changes the low-precision weight of '{name}'")

    # What the tests share.

    def _run(self) -> "Run":
        from mplug.build import choose_device

        run = tiny_run(self.tiny())
        with refusals("the device of this suite's runs", named_by_author=False):  # a machine without it cannot tell
            run.device = choose_device(run.config)
        return run

    def _bench(self) -> "Bench":
        from mplug.testing import dense

        run = self._run()
        return dense.Bench(run, dense.make_pieces(run.device))

    def _weighted(self) -> "Bench":
        from mplug.testing import dense

        run = self._run()
        return dense.Bench(run, dense.with_weights(dense.make_pieces(run.device)), "pieces with bf16 weights")

    def _that_says_one_pass(self) -> "Bench":
        bench = self._weighted()
        if not _one_pass(bench):
            raise SkipTest(f"'{self.plugin}' does not say one_pass")
        return bench


def _one_pass(bench: "Bench") -> bool:
    return bool(getattr(bench.optimizer, "one_pass", False))
