"""The suite for parallel strategies."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import yaml

import mplug_testing.layouts as layouts
from mplug.errors import UsageError, listed
from mplug.registry.entry_points import BrokenPlugin
from mplug.registry.hooks import implemented
from mplug_testing.draws import draws_fault
from mplug_testing.harness import (
    EXACT,
    Portions,
    TinySettings,
    Trace,
    as_they_come,
    difference,
    installed_plugins,
    largest_error,
    movement_of,
    rounding_bound,
    tolerance_of,
    unevenly,
    weights_off,
)
from mplug_testing.layout_checks import LayoutChecks
from mplug_testing.operations import step_seen, steps_seen
from mplug_testing.parity import trained_once
from mplug_testing.suite import Fault, refusals, require
from mplug_testing.workers import WorkerFailed, run_workers

_STEPS: dict[str, list[tuple[str, str]]] = {}
"""What `steps_seen` returned on every rank, by the settings of the run."""
UNFIT_DEGREE = 3
"""A degree that divides neither the tiny run's heads nor its batch, sequence, layers or widths."""


def _key(settings: TinySettings) -> str:
    return json.dumps(dict(settings), sort_keys=True, default=str)


class ParallelSuite(LayoutChecks):
    """The requirements for a strategy: a layout is data, and a run under it equals the run of one process.

    `layouts` are the layouts to run; a refusal of one of them is a fault. None means the strategy alone at degrees 2
    and 4, and at degree 2 with every other installed strategy at 2; refused pairs are skipped.

    The suite runs the first layout again under each of `variants` (name -> settings). A refusal of a variant that the
    author adds is a fault; refused variants of the host are skipped. It also runs the first layout with micro batches
    of different sizes, unless `uneven_micro_batches` is False. `refused` maps layouts that do not fit the tiny run to
    words that the refusal must contain: the numbers, and the remedy.

    The bound for a run in fp64 is 1e-10, plus the tolerance that the strategy declares in a `Variance` (hook `varies`).
    A run with a declared variance must differ from one process by more than rounding. Otherwise another part of the run
    has bypassed the strategy.
    """

    variants: ClassVar[Mapping[str, TinySettings]] = yaml.safe_load(
        Path(__file__).with_name("variants.yaml").read_text()
    )
    refused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    uneven_micro_batches: ClassVar[bool] = True

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """The strategy alone, on two ranks."""
        return {"parallel.layout": f"{cls.plugin}2"}

    @classmethod
    def tried(cls) -> tuple[str, ...]:
        """The layouts to run. The suite runs the first of them under every variant."""
        other_names = [name for name in installed_plugins().names("parallel") if name != cls.plugin]
        pairs = (f"{cls.plugin}2{other}2" for other in other_names)
        return (*cls.alone(), *pairs) if cls.layouts is None else cls.layouts

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each layout, each variant, and each layout in `refused`."""
        choices: dict[str, Callable[[], Iterable[str]]] = {
            "layout": self.tried,
            "variant": lambda: self.variants,
            "unfit": lambda: self.refused,
        }
        for argument, values in choices.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, list(values()))

    # Fields of its Config.

    trains_ahead = True

    @classmethod
    def with_fields(cls, fields: TinySettings, beside: TinySettings) -> dict[str, Any]:
        """The first layout, unless the settings beside the fields name another."""
        own = {".".join((*cls.section(), field)): value for field, value in fields.items()}
        return {**cls.tiny(), "parallel.layout": cls.tried()[0], **beside, **own}

    @classmethod
    def foresee(cls, runs: Sequence[TinySettings]) -> None:
        """Train one step of each run; runs of as many ranks train in the same processes."""
        by_size: dict[int, list[TinySettings]] = {}
        for settings in runs:
            try:
                size = layouts.ranks_of(settings)[0][0].mesh.world_size
            except (UsageError, Fault):  # `evidence` reports it
                continue
            by_size.setdefault(size, []).append(settings)
        for size, equal in by_size.items():
            try:
                seen = run_workers(size, steps_seen, equal)
            except (WorkerFailed, TimeoutError):  # `evidence` finds the run that fails
                continue
            _STEPS.update({_key(one): [rank[n] for rank in seen] for n, one in enumerate(equal)})

    @classmethod
    def evidence(cls, settings: TinySettings) -> Iterator[tuple[str, Any]]:
        """What all ranks hold, what it offers; the operations of a step on every rank, and its loss and gradients."""
        ranks, label = layouts.ranks_of(settings), cls.entry().label
        yield "placements", [repr(model.placements) for _, model in ranks]
        yield (
            "slots",
            [
                [
                    (one.site.name, one.site.slot, one.supplier, [wrap.plugin for wrap in one.wraps])
                    for one in model.slots
                ]
                for _, model in ranks
            ],
        )
        seen = _STEPS.pop(_key(settings), None)
        if seen is None:
            with refusals(f"'{label}' on a rank", named_by_author=False):
                seen = run_workers(len(ranks), step_seen, dict(settings))
        yield "operations", [operations for operations, _ in seen]
        yield "gradients", [numbers for _, numbers in seen]

    def test_a_layout_is_data(self, layout: str) -> None:
        """The same for layouts that combine it with other strategies."""
        with refusals(f"layout '{layout}'", self._named_by_author(layout)):
            ranks = layouts.ranks_of(self.at(layout))
        layouts.require_sound_placements(ranks)

    # Refusals.

    def test_what_does_not_fit_is_refused_before_launch(self, unfit: str) -> None:
        """The refusal is a UsageError that names the numbers."""
        reason = self._refusal(unfit)
        require(reason, f"layout '{unfit}' does not fit the run, and the plugin does not refuse it before launch")
        missing = [words for words in self.refused[unfit] if words not in reason]
        require(not missing, f"the refusal of layout '{unfit}' lacks {listed(map(repr, missing))}: {reason}")

    def test_an_odd_degree_is_refused_or_gives_the_run_of_one_process(self) -> None:
        """A dimension that the degree does not divide is never truncated."""
        layout = f"{self.plugin}{UNFIT_DEGREE}"
        reason = self._refusal(layout)
        if reason:
            named = str(UNFIT_DEGREE) in re.findall(r"\d+", reason.replace(layout, ""))
            require(
                named,
                f"the refusal of layout '{layout}' does not name {UNFIT_DEGREE}, the number that does not fit: "
                f"{reason}",
            )
            return
        try:
            self._require_parity(layout)
        except Fault as fault:
            raise Fault(
                f"degree {UNFIT_DEGREE} is neither refused before launch nor computed correctly: {fault}"
            ) from fault

    # Runs.

    def test_a_layout_gives_the_run_of_one_process(self, layout: str) -> None:
        """Initial values, losses, gradients, norms, the evaluation and the final weights."""
        self._require_parity(layout)

    def test_a_variant_gives_the_run_of_one_process(self, variant: str) -> None:
        """With another model, or other options of the strategy."""
        self._require_parity(self.tried()[0], self.variants[variant], variation=f"with '{variant}'")

    def test_a_run_in_fp32_rounds_as_one_process_does(self) -> None:
        """Against one process in fp64, the run in fp32 has about the same error as one process in fp32."""
        layout = self.tried()[0]
        where, in_fp32 = f"under layout '{layout}' in fp32", {"trainer.precision": "fp32"}
        exact = self._trained(layout)[1]
        traces, alone = self._trained(layout, in_fp32, where)
        off = difference(traces, exact, rounding_bound(alone, exact) + tolerance_of(self.at(layout)))
        require(not off, f"{where}: {off}")

    def test_micro_batches_may_differ_in_size(self) -> None:
        """For example at the end of an epoch."""
        if not self.uneven_micro_batches:
            raise SkipTest(f"'{self.plugin}' sets uneven_micro_batches = False")
        self._require_parity(self.tried()[0], portions=unevenly, variation="with micro batches of different sizes")

    def test_frozen_parameters_stay_and_the_others_train_as_in_one_process(self) -> None:
        """The test freezes every second unit, beginning with the first.

        Units before the first trained one have no gradient.
        """
        layout = self.tried()[0]
        frozen = self._every_second_unit()
        self._require_parity(layout, {"model.frozen": frozen}, variation=f"with {listed(frozen)} frozen")

    def _every_second_unit(self) -> list[str]:
        """The names of every second unit that a config can freeze in the suite's model."""
        from mplug_testing.blueprint import on_meta, units_with_parameters

        run = layouts.prepared(self.at(""))
        return units_with_parameters(on_meta(run))[::2]

    def test_a_degree_of_one_changes_nothing(self) -> None:
        """The run is bitwise equal to one process."""
        layout = f"{self.plugin}1"
        traces, reference = self._trained(layout)
        off = difference(traces, reference, tolerance=0.0) or weights_off(traces, reference, tolerance=0.0)
        require(not off, f"the run under layout '{layout}' is not bitwise equal to one process: {off}")

    def test_each_gradient_is_final_once_a_step(self) -> None:
        """A gradient sink notifies its listeners exactly once a step that the gradient is final."""
        layout = self.tried()[0]
        where = f"under layout '{layout}'"
        for rank, trace in enumerate(self._trained(layout)[0]):
            for step, announced in enumerate(trace.announced, 1):
                for name, times in announced.items():
                    require(
                        times == 1,
                        f"{where} the sink of '{name}' announces {times} final gradients in step {step} on rank "
                        f"{rank}; it must announce one, in the last micro batch or after it",
                    )

    def test_what_kernels_draw_is_other_wherever_work_is(self) -> None:
        """Masks of fused dropout are equal for copies, whatever the order of execution, and differ everywhere else."""
        layout = self.tried()[0]
        where = f"under layout '{layout}'"
        found = draws_fault(*self._trained(layout))
        require(not found, f"{where} kernels that draw random numbers themselves draw {found}")

    def test_stages_sample_the_texts_of_one_process(self) -> None:
        """If the strategy runs stages forward (`Pipeline.relay`): with caches, and prompts of different lengths."""
        from mplug_testing.sampled import sampling_fault

        settings, relay = self.at(self.alone()[0]), None
        if "build_pipeline" in implemented(installed_plugins().load(self.entry())):
            _, model = layouts.ranks_of(settings)[0]
            relay = model.pipeline and model.pipeline.relay
        if relay is None:
            raise SkipTest(f"'{self.plugin}' divides no model into stages that sample")
        found = sampling_fault(layouts.prepared(settings).mesh.world_size, settings)
        require(not found, f"under layout '{settings['parallel.layout']}', {found}")

    def _named_by_author(self, layout: str, changes: TinySettings | None = None) -> bool:
        """Whether the suite's author named the layout, or the changes to it, so that a refusal is a fault."""
        if changes is None:
            return layout in (*(self.layouts or ()), *self.alone())
        return changes in self.variants.values() and changes not in ParallelSuite.variants.values()

    def _refusal(self, layout: str) -> str:
        """The reason why a run is refused before launch; empty if it is accepted."""
        try:
            layouts.ranks_of(self.at(layout))
        except BrokenPlugin as error:
            raise Fault(f"layout '{layout}': {error}") from error
        except UsageError as error:
            return str(error)
        return ""

    def _require_parity(
        self, layout: str, changes: TinySettings | None = None, portions: Portions = as_they_come, variation: str = ""
    ) -> None:
        where = f"under layout '{layout}'{variation and f' {variation}'}"
        traces, reference = self._trained(layout, changes, where, portions)
        tolerance = tolerance_of(self.at(layout, changes))
        off = difference(traces, reference, tolerance) or weights_off(traces, reference, movement_of(tolerance))
        require(not off, f"{where}: {off}")
        self._require_declared_variance(layout, changes, where, largest_error(traces, reference))

    def _require_declared_variance(self, layout: str, changes: TinySettings | None, where: str, error: float) -> None:
        """Fault if a run is exact although the strategy declares a variance: something bypassed the strategy."""
        declared = layouts.prepared(self.at(layout, changes)).variances.get(self.entry().label)
        require(
            declared is None or error > EXACT,
            f"{where} the run equals one process up to rounding ({error:.1e}), although the strategy declares a "
            f"variance ({declared and declared.reason}): another part of the layout bypasses the strategy, or the "
            f"declaration is wrong; name the axes over which it sums in Variance.sums, or correct the declaration",
        )

    def _trained(
        self,
        layout: str,
        changes: TinySettings | None = None,
        where: str = "",
        portions: Portions = as_they_come,
    ) -> tuple[list[Trace], Trace]:
        """The traces of a run's ranks and of one process; Fault if a rank fails.

        A refusal of the run, before launch or by a rank, is a Fault or a SkipTest, as in `refusals`.
        """
        where, settings = where or f"under layout '{layout}'", self.at(layout, changes)
        alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
        with refusals(f"{where} the run", self._named_by_author(layout, changes)):
            layouts.ranks_of(settings)  # a refusal by a rank other than 0 comes too late, and is a Fault
            try:
                return trained_once(settings, portions), trained_once(alone)[0]
            except (WorkerFailed, TimeoutError) as error:
                raise Fault(f"{where}: {error}") from None
