"""The suite of optimizers.

An optimizer's author subclasses it in a test module, and writes what an update is:

    from mplug.testing import DenseStep, OptimizerSuite

    class TestOrthon(OptimizerSuite):
        plugin = "orthon"

        def reference(self, weight, steps, parameter, config):
            for gradient, lr, weight_decay in steps:
                ...
            return weight

The pieces that are updated are in `dense.py`; who writes low-precision weights is checked in `weights.py`.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from unittest import SkipTest

from mplug.registry import Registry
from mplug.testing.harness import STEPS, Trace, difference, logical, tiny_run, train_steps
from mplug.testing.suite import Fault, naming_failures, refusals, require, smoke
from mplug.testing.waiting import never_waiting
from mplug.testing.weights import WeightSuite
from mplug.testing.workers import run_workers

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts import Piece
    from mplug.plan import Parameter

SCHEDULE = [(1e-2, 0.1, 1.0), (2e-2, 0.1, 0.25), (5e-3, 0.0, 4.0), (0.0, 0.5, 1.0), (3e-2, 0.3, 0.125)]
"""(learning rate, weight decay, scale of gradients) of the steps that are compared with the reference."""


class DenseStep(NamedTuple):
    """A step as a reference sees it: the gradient, scaled, and 0 for weight decay where the parameter has none."""

    gradient: "Tensor"
    lr: float
    weight_decay: float


class OptimizerSuite(WeightSuite):
    """Update by update against a reference that the author writes, and in runs under layouts against one process.

    Weights may differ from the reference's by `tolerance` of the largest change, and under a layout by as much of the
    weight. `layouts` are those that are tried, none of which may be refused; None: every installed strategy over two
    ranks, but for those that refuse it.
    """

    kind = "optimizers"
    tolerance: ClassVar[float] = 1e-5
    layouts: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """One optimizer a run."""
        return {"optimizer.name": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """Its section is 'optimizer'."""
        return ("optimizer",)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """A test that takes a layout runs once under each."""
        if "layout" in metafunc.fixturenames:
            installed = tuple(f"{name}2" for name in Registry().names("parallel") if "/" not in name)
            metafunc.parametrize("layout", installed if self.layouts is None else self.layouts)

    def reference(self, weight: "Tensor", steps: list[DenseStep], parameter: "Parameter", config: Any) -> "Tensor":
        """The weight after the steps, in fp64, written as plainly as can be; `config` is the plugin's.

        An optimizer that needs whole matrices gets one matrix at a time: a segment of a fused weight, or an expert.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no reference; write what an update is, as plainly as can be"
        )

    # What it says.

    @smoke
    def test_its_config_has_the_rate_and_the_decay_that_the_schedule_reads(self) -> None:
        """`lr` and `weight_decay`."""
        config = self.config().optimizer
        for field in ("lr", "weight_decay"):
            value = getattr(config, field, None)
            require(isinstance(value, float), f"its Config has no number '{field}', which the host's schedule scales")

    @smoke
    def test_it_says_what_it_needs_and_is_built_without_memory(self) -> None:
        """As the host builds it before a run, to refuse layouts and to count bytes: building reads no values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from mplug.testing import dense

        run = self._run()
        with FakeTensorMode():
            bench = dense.Bench(run, dense.make_pieces(run.device), "tensors without memory")
            with naming_failures("its state of tensors without memory"):
                list(bench.states())
        needs, one_pass = (getattr(bench.optimizer, name, None) for name in ("needs", "one_pass"))
        require(needs in ("elements", "matrices"), f"its needs must be 'elements' or 'matrices', and it is {needs!r}")
        require(one_pass in (None, True, False), f"its one_pass must be True or False, and it is {one_pass!r}")

    # What an update does.

    def test_updates_are_those_of_the_reference(self) -> None:
        """Over steps whose rate, decay and scale change, for every shape of parameter."""
        from mplug.testing import dense

        bench = self._bench()
        before = {piece.name: piece.master.double() for piece in bench.pieces}
        for number, (lr, decay, scale) in enumerate(SCHEDULE):
            bench.step(number, lr=lr, weight_decay=decay, scale=scale)
        whole = bench.optimizer.needs == "elements"
        for piece in bench.pieces:
            for name, part in [(f"'{piece.name}'", (...,))] if whole else dense.matrices(piece):
                self._refuse_other_update(name, piece, part, before[piece.name][part])

    @smoke
    def test_the_learning_rate_is_read_at_every_step(self) -> None:
        """It is a tensor that a schedule changes."""
        import torch

        one, other = self._bench(), self._bench()
        for bench, lr in ((one, 1e-2), (other, 3e-2)):
            bench.step(1)
            bench.step(2, lr=lr)
        for mine, theirs in zip(one.pieces, other.pieces, strict=True):
            require(
                not torch.equal(mine.master, theirs.master),
                f"the learning rate of the second step makes no difference to '{mine.name}': read scalars.lr in step",
            )

    @smoke
    def test_gradients_are_scaled(self) -> None:
        """Clipping and the division by the number of tokens are in `scale`."""
        from mplug.testing import dense

        one, other = self._bench(), self._bench()
        for number, scale in enumerate((0.25, 8.0, 0.5)):
            one.step(number, scale=scale)
            other.step(number, dense.times(scale))
        found = dense.apart(one.snapshot(), other.snapshot(), self.tolerance)
        require(
            not found,
            f"{found} is not the same for gradients with a scale as for scaled gradients; multiply every gradient by "
            f"scalars.scale",
        )

    @smoke
    def test_weight_decay_applies_where_the_plan_says(self) -> None:
        """And nowhere else; its strength is the step's."""
        import torch

        one, other = self._bench(), self._bench()
        one.step(1, weight_decay=0.0)
        other.step(1, weight_decay=0.5)
        for mine, theirs in zip(one.pieces, other.pieces, strict=True):
            if torch.equal(mine.master, theirs.master) == mine.parameter.decays:
                raise Fault(
                    f"'{mine.name}' is the same with scalars.weight_decay of 0 and of 0.5, and its parameter decays"
                    if mine.parameter.decays
                    else f"'{mine.name}' decays, and its parameter does not: read piece.parameter.decays"
                )

    @smoke
    def test_a_skipped_step_changes_nothing(self) -> None:
        """Where `skip` is 1: no bit of weights or state, whatever the gradients are."""
        from mplug.testing import dense

        for factor in (1.0, float("nan"), float("inf")):
            bench = self._bench()
            bench.step(1)
            before = bench.snapshot()
            bench.step(2, dense.times(factor), skip=1.0, scale=factor)
            changed, what = (
                dense.other_bits(before, bench.snapshot()),
                "" if factor == 1 else f" with {factor} gradients",
            )
            require(not changed, f"a skipped step{what} changes {changed}; where scalars.skip is 1, nothing may change")

    @smoke
    def test_a_skipped_step_is_not_remembered(self) -> None:
        """The steps after it are as if it had not been."""
        from mplug.testing import dense

        one, other = self._bench(), self._bench()
        one.step(1)
        one.step(7, skip=1.0)
        one.step(2)
        other.step(1)
        other.step(2)
        changed = dense.other_bits(one.masters(), other.masters())
        require(not changed, f"the step after a skipped one gives {changed} other bits: it remembers the skipped one")

    @smoke
    def test_a_step_does_not_wait_for_the_device(self) -> None:
        """It reads no tensor's value: learning rate, scale and skip are tensors for that."""
        from mplug.testing import dense

        bench = self._bench()
        bench.step(1)
        scalars = bench.scalars()
        try:
            with dense.NoReading():
                bench.optimizer.step(scalars)
        except dense.HostReads as read:
            raise Fault(
                f"a step reads a tensor's value on the host ({read}); on a GPU it waits for the device"
            ) from read

    def test_no_step_on_a_gpu_synchronises(self) -> None:
        """By torch's own account: nothing that the step calls waits, either."""
        bench = self._bench()
        if not bench.pieces[0].master.is_cuda:
            raise SkipTest(f"'{self.plugin}' updates tensors on the CPU here")
        bench.step(1)
        scalars = bench.scalars()
        with never_waiting():
            bench.optimizer.step(scalars)

    # State.

    @smoke
    def test_state_is_what_checkpoints_can_hold(self) -> None:
        """Tensors of the piece's shape, or scalars; 'weight' is the name of the weight itself."""
        import torch

        for piece, name, tensor in self._bench().states():
            where = f"the state '{name}' of '{piece.name}'"
            require(isinstance(tensor, torch.Tensor), f"{where} is no tensor: {tensor!r}")
            require(name != "weight", f"{where} has the name that checkpoints give to the weight; choose another")
            fits = tensor.shape in ((), piece.master.shape)
            require(
                fits, f"{where} has shape {tuple(tensor.shape)}, not the piece's {tuple(piece.master.shape)}, nor ()"
            )
            require(not tensor.requires_grad, f"{where} requires a gradient")

    @smoke
    def test_state_is_live(self) -> None:
        """What `state` has given shows every later step, so that a checkpoint's numbers can be copied into it."""
        import torch

        bench = self._bench()
        bench.step(1)
        held = list(bench.states())
        bench.step(2)
        for (piece, name, tensor), (_, _, now) in zip(held, bench.states(), strict=True):
            live = torch.equal(tensor, now)
            require(live, f"the state '{name}' of '{piece.name}' is a copy: later steps do not show in it")

    @smoke
    def test_copied_state_continues_to_the_bit(self) -> None:
        """All that the next step depends on is in weights and state."""
        from mplug.testing import dense

        one, other = self._bench(), self._bench()
        one.step(1)
        one.step(2)
        for mine, theirs in zip(other.pieces, one.pieces, strict=True):
            mine.master.copy_(theirs.master)
        for (_, _, empty), (_, _, saved) in zip(other.states(), one.states(), strict=True):
            empty.copy_(saved)
        one.step(3)
        other.step(3)
        changed = dense.other_bits(one.snapshot(), other.snapshot())
        require(not changed, f"a step from copied state gives {changed} other bits: it depends on something else")

    # Parts, and layouts.

    @smoke
    def test_what_it_needs_is_enough(self) -> None:
        """Where it needs elements only, the halves of a piece may be updated alone."""
        from mplug.testing import dense

        one = self._bench()
        if one.optimizer.needs != "elements":
            raise SkipTest(f"'{self.plugin}' needs whole matrices")
        pieces = dense.make_pieces(one.run.device)
        cut = [half for piece in pieces for half in dense.halves(piece)]
        other = dense.Bench(one.run, cut, "halves of pieces, though it says that it needs elements only")
        for number in (1, 2):
            one.step(number)
            for piece in pieces:
                piece.gradient.copy_(dense.gradient_of(piece, number))
            other.step(number, lambda half, _: half.gradient)
        found = dense.apart(
            one.masters(), {f"the weight '{piece.name}'": piece.master for piece in pieces}, self.tolerance
        )
        require(
            not found,
            f"it says that it needs elements only, and {found} is another where its halves are updated alone; "
            f"if an update looks at a whole matrix, its needs are 'matrices'",
        )

    @smoke
    def test_it_takes_ranks_that_hold_padding_or_nothing(self) -> None:
        """A rank of a divided vocabulary may hold nothing but padding, and a stage nothing that is trained."""
        from mplug.testing import dense

        run = self._run()
        empty = dense.Bench(run, [], "no pieces, which is what a rank may have")
        empty.step(1)
        if empty.optimizer.needs == "elements":  # else the host refuses layouts that cut a table
            piece, run.rank = dense.padding(run.device)
            bench = dense.Bench(run, [piece], "nothing but padding")
            for number in (1, 2):
                bench.step(number, dense.times(0.0))
            require(bool(piece.master.isfinite().all()), "padding, whose gradient is 0, does not stay finite")

    def test_a_layout_gives_the_weights_of_one_process(self, layout: str) -> None:
        """Losses, gradients and norms too; a layout that the host refuses is skipped, unless `layouts` names it."""
        from mplug.build import build_model

        settings = self.tiny(parallel__layout=layout)
        with refusals(f"layout '{layout}'", named_by_author=self.layouts is not None):
            run = tiny_run(settings)
            build_model(run)
        with naming_failures(f"a run under {layout}"):
            traces = run_workers(run.mesh.world_size, train_steps, settings)
        reference = train_steps(self.tiny())
        found = _weights_off(traces, reference, self.tolerance) or difference(traces, reference).partition(";")[0]
        require(not found, f"under {layout} {found}")

    # What the tests share.

    def _refuse_other_update(self, name: str, piece: "Piece", part: tuple[Any, ...], old: "Tensor") -> None:
        """Compare a piece, or one matrix of it, with the reference after all steps of the schedule."""
        import torch

        from mplug.testing import dense

        steps = [
            DenseStep(
                dense.gradient_of(piece, number)[part].double() * scale, lr, decay if piece.parameter.decays else 0.0
            )
            for number, (lr, decay, scale) in enumerate(SCHEDULE)
        ]
        exact = self.reference(old, steps, piece.parameter, self.config().optimizer)
        error = float((piece.master[part].double() - exact).abs().max())
        rounding = len(SCHEDULE) * torch.finfo(torch.float32).eps * float(exact.abs().max())
        allowed = self.tolerance * float((exact - old).abs().max()) + rounding
        require(
            error <= allowed,
            f"after {len(steps)} steps {name} is off the reference by {error:.3g} (allowed: {allowed:.3g})",
        )


def _weights_off(traces: list[Trace], reference: Trace, tolerance: float) -> str:
    for name, shape in reference.shapes.items():
        expected = logical([reference.weights], name, shape)
        error = float((logical([trace.weights for trace in traces], name, shape) - expected).norm())
        allowed = tolerance * float(expected.norm())
        if not error <= allowed:
            return f"the weight '{name}' is off by {error:.3g} after {STEPS} steps (allowed: {allowed:.3g})"
    return ""
