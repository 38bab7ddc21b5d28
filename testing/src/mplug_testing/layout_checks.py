"""What the suite for strategies requires of layouts as data: axes, placements and offers, without processes."""

from collections.abc import Callable
from itertools import chain
from typing import ClassVar, TypeVar
from unittest import SkipTest

import mplug_testing.layouts as layouts
from mplug.errors import UsageError, listed
from mplug.layout.mesh import Axis, parse_layout
from mplug.run.run import Run
from mplug_testing.harness import TinySettings, installed_plugins
from mplug_testing.layouts import Ranks
from mplug_testing.suite import PluginSuite, refusals, require, smoke

T = TypeVar("T")


class LayoutChecks(PluginSuite):
    """The part of `ParallelSuite` that starts no process."""

    kind = "parallel"
    layouts: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """Its own subsection of `parallel`."""
        return "parallel", cls.plugin

    @classmethod
    def at(cls, layout: str, changes: TinySettings | None = None) -> TinySettings:
        """The settings of the tiny run under a layout. No degree divides the number of samples of an evaluation."""
        return {**cls.tiny(), "trainer.eval_samples": 7, **(changes or {}), "parallel.layout": layout}

    @classmethod
    def alone(cls) -> tuple[str, ...]:
        """The layouts that name no other strategy; degrees 2 and 4 if `layouts` has no such layout."""
        names = installed_plugins().names(cls.kind)
        own = tuple(layout for layout in cls.layouts or () if set(parse_layout(layout, names)) == {cls.plugin})
        return own or (f"{cls.plugin}2", f"{cls.plugin}4")

    # Axes.

    @smoke
    def test_its_axes_are_the_same_on_every_call(self) -> None:
        """`mesh_axes` is a pure function of the config: every rank and every later call gets the same mesh."""
        for layout, run in self._meshes().items():
            again = layouts.prepared(self.at(layout))
            calls = [list(map(layouts.comparable, self._axes(each))) for each in (run, run, again)]
            require(
                calls[0] == calls[1] == calls[2],
                f"three calls return different axes of '{layout}': {calls[0]}, {calls[1]} and {calls[2]}; mesh_axes "
                f"must be a pure function of the config",
            )

    @smoke
    def test_its_degree_is_the_size_of_its_axes(self) -> None:
        """In every view that has any of its axes. So a layout word states the number of ranks."""
        for layout, run in self._meshes().items():
            degree, sizes = run.config.parallel.degrees[self.plugin], dict[str, int]()
            for axis in self._axes(run):
                for view in axis.views:
                    sizes[view] = sizes.get(view, 1) * axis.size
            for view, size in sizes.items():
                require(
                    size == degree,
                    f"in layout '{layout}' its axes have {size} ranks in the view '{view}'; they must have {degree}, "
                    f"the degree in the layout",
                )

    @smoke
    def test_its_axes_share_no_name_with_anothers(self) -> None:
        """The name alone identifies an axis."""
        own = [axis.name for axis in self._axes(next(iter(self._meshes().values())))]
        require(len(set(own)) == len(own), f"it adds two axes with the same name to the mesh: {listed(own)}")
        for entry in installed_plugins().entries(self.kind):
            if entry != self.entry():
                try:
                    axes = layouts.axes_of(layouts.prepared({"parallel.layout": f"{entry.name}2"}), entry.label)
                except UsageError:  # the other strategy refuses this config, which is no fault of this plugin
                    continue
                shared = {axis.name for axis in axes}.intersection(own)
                require(not shared, f"{entry.label} adds an axis '{''.join(shared)}' too; rename yours")

    @smoke
    def test_its_index_maps_give_every_index_to_one_rank(self) -> None:
        """For every length that the maps do not refuse."""
        for run in self._meshes().values():
            for axis in self._axes(run):
                layouts.require_partition(axis)

    # Layouts as data.

    @smoke
    def test_its_layouts_are_data(self) -> None:
        """mplug computes every rank's mesh, placements and offers without processes.

        All ranks together hold all parameters.
        """
        for ranks in self._ranks().values():
            layouts.require_sound_placements(ranks)

    @smoke
    def test_all_ranks_together_read_every_token_once(self) -> None:
        """The parts of the batch contain every token that one process reads, each exactly once."""
        whole = layouts.tokens_of(*layouts.ranks_of(self.at(""))[0])
        for ranks in self._ranks().values():
            layouts.require_every_token_once(ranks, whole)

    # Offers.

    @smoke
    def test_its_offers_are_pure_and_true(self) -> None:
        """Offering changes nothing; the slots exist; `supports` answers; all sites of a role get the same callable."""
        label, number = self.entry().label, 0
        for run, model in chain.from_iterable(self._ranks().values()):
            number += len(layouts.offers_of(run, model, label))
            layouts.require_pure_offers(run, model, label)
            layouts.require_true_offers(run, model, label)
            layouts.require_one_callable_a_role(model, label)
        if not number:
            raise SkipTest(f"'{self.plugin}' offers nothing for any slot")

    # Shared by the tests.

    def _meshes(self) -> dict[str, Run]:
        """The prepared run of each layout of the strategy alone."""
        return self._not_refused(lambda layout: layouts.prepared(self.at(layout)))

    def _ranks(self) -> dict[str, Ranks]:
        """All ranks of each layout of the strategy alone."""
        return self._not_refused(lambda layout: layouts.ranks_of(self.at(layout)))

    def _not_refused(self, build: Callable[[str], T]) -> dict[str, T]:
        """`build` of each layout of the strategy alone, without refused layouts; SkipTest if all are refused."""
        found, reasons = dict[str, T](), list[str]()
        for layout in self.alone():
            try:
                with refusals(f"layout '{layout}'", layout in (self.layouts or ())):
                    found[layout] = build(layout)
            except SkipTest as reason:
                reasons.append(str(reason))
        if not found:
            raise SkipTest("; ".join(reasons))
        return found

    def _axes(self, run: Run) -> list[Axis]:
        return layouts.axes_of(run, self.entry().label)
