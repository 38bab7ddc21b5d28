"""The suite for optimizers.

An optimizer's author subclasses it in a test module, and writes a reference of the update:

    from mplug_testing import DenseStep, OptimizerSuite

    class TestOrthon(OptimizerSuite):
        plugin = "orthon"

        def reference(self, weight, steps, parameter, config):
            for gradient, lr, weight_decay in steps:
                ...
            return weight

`dense.py` makes the pieces. `weights.py` checks who writes low-precision weights.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from unittest import SkipTest

from mplug_testing.harness import STEPS, Trace, difference, in_fp64, installed_plugins, logical, tiny_run, train_steps
from mplug_testing.optimizer_states import StateChecks
from mplug_testing.parity import trained_once
from mplug_testing.suite import Fault, naming_failures, refusals, require, smoke
from mplug_testing.waiting import never_waiting
from mplug_testing.workers import run_workers

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts.optimizer import Piece
    from mplug.layout.plan import Parameter

SCHEDULE = [(1e-2, 0.1, 1.0), (2e-2, 0.1, 0.25), (5e-3, 0.0, 4.0), (0.0, 0.5, 1.0), (3e-2, 0.3, 0.125)]
"""(learning rate, weight decay, scale of gradients) of the steps that the suite compares with the reference."""


class DenseStep(NamedTuple):
    """One step, as a reference receives it: the scaled gradient, and weight decay 0 if the parameter does not decay."""

    gradient: "Tensor"
    lr: float
    weight_decay: float


class OptimizerSuite(StateChecks):
    """Compares updates with a reference that the author writes, and runs under layouts with one process.

    A weight may differ from the reference by `tolerance` times the largest change, and under a layout by `tolerance`
    times the weight's norm. `layouts` are the layouts to try; a refusal of one of them is a fault. None means every
    installed strategy on two ranks, and skips refused layouts.
    """

    kind = "optimizers"
    tolerance: ClassVar[float] = 1e-5
    layouts: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """`optimizer.name`."""
        return {"optimizer.name": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """The section 'optimizer'."""
        return ("optimizer",)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test that has an argument `layout` once per layout."""
        if "layout" in metafunc.fixturenames:
            installed = tuple(f"{name}2" for name in installed_plugins().names("parallel") if "/" not in name)
            metafunc.parametrize("layout", installed if self.layouts is None else self.layouts)

    def reference(self, weight: "Tensor", steps: list[DenseStep], parameter: "Parameter", config: Any) -> "Tensor":
        """The weight after the steps, in fp64, written as plainly as possible; `config` is the plugin's config.

        If the optimizer asks the assembler for the matrices of a parameter, `weight` is one of them: a segment of a
        fused weight, or an expert.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `reference`: the update, written as plainly as possible"
        )

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Weights and states of artificial pieces after steps with the config's own rate and decay."""
        import mplug_testing.dense as dense
        from mplug_testing.fields import digest

        run = cls.run_of(settings)
        bench, config = dense.Bench(run, dense.make_pieces(run.device)), run.config.optimizer
        for number in range(len(SCHEDULE)):
            bench.step(number, lr=config.lr, weight_decay=config.weight_decay)
        yield "weights", digest(bench.masters())
        yield "states", digest(bench.snapshot())

    # Its declarations.

    @smoke
    def test_its_config_has_the_rate_and_the_decay_that_the_schedule_reads(self) -> None:
        """The fields are `lr` and `weight_decay`."""
        config = self.config().optimizer
        for field in ("lr", "weight_decay"):
            value = getattr(config, field, None)
            require(isinstance(value, float), f"its Config needs a number '{field}', which the host's schedule scales")

    @smoke
    def test_it_is_built_without_memory(self) -> None:
        """Before a run the host builds it without memory, to read its attributes and to count bytes.

        So building reads no values.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        import mplug_testing.dense as dense

        run = self._run()
        with FakeTensorMode():
            bench = dense.Bench(run, dense.make_pieces(run.device), "tensors without memory")
            with naming_failures("its state of tensors without memory"):
                list(bench.states())
        for name in ("one_pass", "low_precision_gradients"):
            value = getattr(bench.optimizer, name)
            require(value in (True, False), f"its `{name}` is {value!r}; it must be True or False")

    # Updates.

    def test_updates_are_those_of_the_reference(self) -> None:
        """Over steps with changing rate, decay and scale, for every shape of parameter."""
        import mplug_testing.dense as dense

        bench = self._bench()
        before = {piece.name: piece.master.double() for piece in bench.pieces}
        for number, (lr, decay, scale) in enumerate(SCHEDULE):
            bench.step(number, lr=lr, weight_decay=decay, scale=scale)
        for piece in bench.pieces:
            is_asked = piece.name in bench.assembler.asked
            for name, part in dense.matrices(piece) if is_asked else [(f"'{piece.name}'", (...,))]:
                self._refuse_other_update(name, piece, part, before[piece.name][part])

    @smoke
    def test_the_learning_rate_is_read_at_every_step(self) -> None:
        """The learning rate is a tensor that a schedule changes."""
        import torch

        one, other = self._bench(), self._bench()
        for bench, lr in ((one, 1e-2), (other, 3e-2)):
            bench.step(1)
            bench.step(2, lr=lr)
        for piece, other_piece in zip(one.pieces, other.pieces, strict=True):
            require(
                not torch.equal(piece.master, other_piece.master),
                f"the learning rate of the second step has no effect on '{piece.name}'; read scalars.lr in step",
            )

    @smoke
    def test_gradients_are_scaled(self) -> None:
        """`scale` contains clipping and the division by the number of tokens."""
        import mplug_testing.dense as dense

        one, other = self._bench(), self._bench()
        for number, scale in enumerate((0.25, 8.0, 0.5)):
            one.step(number, scale=scale)
            other.step(number, dense.times(scale))
        found = dense.apart(one.snapshot(), other.snapshot(), self.tolerance)
        require(
            not found,
            f"{found} differs between a step with scalars.scale and a step with scaled gradients; multiply every "
            f"gradient by scalars.scale",
        )

    @smoke
    def test_weight_decay_applies_where_the_plan_says(self) -> None:
        """Other parameters do not decay. The step's scalars state the strength."""
        import torch

        one, other = self._bench(), self._bench()
        one.step(1, weight_decay=0.0)
        other.step(1, weight_decay=0.5)
        for piece, other_piece in zip(one.pieces, other.pieces, strict=True):
            if torch.equal(piece.master, other_piece.master) == piece.parameter.decays:
                raise Fault(
                    f"'{piece.name}' decays in the plan, and scalars.weight_decay has no effect on it; read "
                    f"scalars.weight_decay in step"
                    if piece.parameter.decays
                    else f"'{piece.name}' does not decay in the plan, and the step decays it; read "
                    f"piece.parameter.decays"
                )

    @smoke
    def test_a_step_does_not_wait_for_the_device(self) -> None:
        """A step reads no tensor's value on the CPU. For this reason learning rate, scale and skip are tensors."""
        import mplug_testing.dense as dense

        bench = self._bench()
        bench.step(1)
        scalars = bench.scalars()
        try:
            with dense.NoReading():
                bench.optimizer.step(scalars)
        except dense.HostReads as read:
            raise Fault(
                f"a step reads a tensor's value on the CPU ({read}), which waits for the device on a GPU; compute on "
                f"tensors instead"
            ) from read

    def test_no_step_on_a_gpu_synchronises(self) -> None:
        """torch's synchronization check raises no error for anything that the step calls."""
        bench = self._bench()
        if not bench.pieces[0].master.is_cuda:
            raise SkipTest(f"'{self.plugin}' updates tensors on the CPU here")
        bench.step(1)
        scalars = bench.scalars()
        with never_waiting():
            bench.optimizer.step(scalars)

    @smoke
    def test_a_replayed_step_is_a_step(self) -> None:
        """If the plugin states by `captures` that its steps can be replayed, they read everything from tensors."""
        import mplug_testing.replays as replays

        one, other = self._bench(), self._bench()
        if not replays.is_stated(one.run, self.entry().label):
            raise SkipTest(f"'{self.plugin}' does not state that its steps can be replayed")
        fault = "" if one.pieces[0].master.is_cuda else replays.replay_fault(one, other)
        require(
            not fault,
            f"its plugin states 'captures', and {fault}; read what changes from step to step from tensors, and "
            f"change state in place",
        )

    # Parts, and layouts.

    @smoke
    def test_what_it_needs_is_enough(self) -> None:
        """The halves of a piece can be updated separately, unless it asks the assembler for the piece's matrices."""
        import mplug_testing.dense as dense

        one = self._bench()
        pieces = [piece for piece in dense.make_pieces(one.run.device) if piece.name not in one.assembler.asked]
        others = []
        for rank in (0, 1):
            run = self._run()
            run.rank = rank
            subject = "halves of pieces, for which it asks no assembler"
            others.append(dense.Bench(run, dense.halves(pieces, rank), subject))
        for number in (1, 2):
            one.step(number)
            for piece in pieces:
                piece.gradient.copy_(dense.gradient_of(piece, number))
            for other in others:
                other.step(number, lambda half, _: half.gradient)
        found = dense.apart(
            {f"the weight '{piece.name}'": piece.master for piece in pieces}, one.masters(), self.tolerance
        )
        require(
            not found,
            f"{found} differs if its halves are updated separately; if an update reads a whole matrix, ask the "
            f"assembler for it (assembler.matrices)",
        )

    @smoke
    def test_several_optimizers_update_their_pieces_as_one_does(self) -> None:
        """The host builds an optimizer for each group of parameters (`optimizer.groups`), with rates of its own."""
        import mplug_testing.dense as dense

        one = self._bench()
        pieces = dense.make_pieces(one.run.device)
        parts = [dense.Bench(one.run, pieces[start::2], "a part of the pieces") for start in (0, 1)]
        for number in (1, 2):
            one.step(number)
            for part in parts:
                part.step(number)
        found = dense.apart(one.masters(), {**parts[0].masters(), **parts[1].masters()}, self.tolerance)
        require(
            not found,
            f"{found} differs if several optimizers update the pieces; an optimizer must keep everything that it needs "
            f"in the object that build_optimizer returns",
        )

    @smoke
    def test_it_takes_ranks_that_hold_padding_or_nothing(self) -> None:
        """A rank of a divided vocabulary may hold only padding, and a pipeline stage may have no trained parameter."""
        import mplug_testing.dense as dense

        run = self._run()
        empty = dense.Bench(run, [], "no pieces, as on a rank without trained parameters")
        empty.step(1)
        piece, run.rank = dense.padding(run.device)
        bench = dense.Bench(run, [piece], "padding only")
        if piece.name in bench.assembler.asked:
            return  # it would exchange parts with other ranks
        for number in (1, 2):
            bench.step(number, dense.times(0.0))
        require(bool(piece.master.isfinite().all()), "padding, whose gradient is 0, becomes infinite or NaN")

    def test_a_layout_gives_the_weights_of_one_process(self, layout: str) -> None:
        """Weights, losses, gradients and norms are equal.

        A layout that the host refuses is skipped, unless `layouts` names it. So is one whose workers train on their
        own.
        """
        from mplug.model.build import build_model

        settings = in_fp64(self.tiny(parallel__layout=layout))
        with refusals(f"layout '{layout}'", named_by_author=self.layouts is not None):
            run = tiny_run(settings)
            build_model(run)
        if run.mesh.independent and self.layouts is None:
            raise SkipTest(f"the workers of layout '{layout}' train on their own")
        with naming_failures(f"a run under {layout}"):
            traces = run_workers(run.mesh.world_size, train_steps, settings)
        reference = trained_once(self.tiny())[0]
        found = _weights_off(traces, reference, self.tolerance) or difference(traces, reference).partition(";")[0]
        require(not found, f"under {layout} {found}")

    # Shared by the tests.

    def _refuse_other_update(self, name: str, piece: "Piece", part: tuple[Any, ...], old: "Tensor") -> None:
        """Compare a piece, or one matrix of it, with the reference after all steps of the schedule."""
        import torch

        import mplug_testing.dense as dense

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
            f"after {len(steps)} steps, {name} differs from the reference by {error:.3g} (allowed: {allowed:.3g})",
        )


def _weights_off(traces: list[Trace], reference: Trace, tolerance: float) -> str:
    for name, shape in reference.shapes.items():
        expected = logical([reference.weights], name, shape)
        error = float((logical([trace.weights for trace in traces], name, shape) - expected).norm())
        allowed = tolerance * float(expected.norm())
        if not error <= allowed:
            return f"the weight '{name}' has an error of {error:.3g} after {STEPS} steps (allowed: {allowed:.3g})"
    return ""
