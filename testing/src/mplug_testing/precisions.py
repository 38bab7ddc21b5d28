"""The suite for precisions.

    from mplug_testing import PrecisionSuite

    class TestRingo(PrecisionSuite):
        plugin = "ringo"
        settings = {"precisions.ringo.bits": 10}
        layouts = ("dp2", "tp2")

Its tests compare tiny runs in the precision with the same runs in fp64.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest, mock

from mplug.errors import listed
from mplug.registry.entry_points import BrokenPlugin
from mplug.registry.precisions import defined, precision_among
from mplug_testing.harness import difference, installed_plugins, run_tolerance, tiny_run, train_ranks, train_steps
from mplug_testing.suite import Fault, PluginSuite, refusals, require, smoke

if TYPE_CHECKING:
    from mplug.precisions.precision import Precision


class PrecisionSuite(PluginSuite):
    """The requirements for a precision: sound formats, a recipe with suppliers, and training that stays near fp64.

    `layouts` are the layouts under which the tiny run is compared with one process (settings may follow a layout).
    `tolerance` is the maximum relative error of losses, gradients and norms against fp64, and against one process;
    None: a bound that fits the format of activations. A precision whose recipe rounds more needs its own. If another
    plugin supplies the products of the recipe, `settings` must name it.
    """

    kind = "precisions"
    exact: ClassVar[Mapping[str, str]] = {}
    """Operands of linear layers that the recipe does not round -> the reason; names as in `rounding.OPERANDS`."""
    layouts: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[float | None] = None

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """`trainer.precision` names the plugin. Every step starts with a loss scale of 1."""
        return {"trainer.precision": cls.plugin, "trainer.loss_scale.initial": 1.0}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`precisions.NAME`."""
        return ("precisions", cls.plugin.rpartition("/")[2])

    @classmethod
    def precision(cls) -> "Precision":
        """The precision of the tiny run."""
        try:
            return tiny_run(cls.tiny()).precision
        except BrokenPlugin as error:
            raise Fault(str(error)) from None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each layout."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.layouts)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Formats without the recipe's options; loss and gradients of a micro batch; and two steps of training."""
        from mplug_testing.fields import digest
        from mplug_testing.model_checks import Trial

        precision = tiny_run(settings).precision
        yield "formats", {name: value for name, value in precision.as_mapping().items() if name != "recipe"}
        if tiny_run(settings).config.trainer.device == "cpu":
            trial = Trial.of(settings)
            yield "losses and gradients", digest(trial.loss(trial.batches[0]), trial.gradients(trial.batches[:1]))
        trace = train_steps(settings)
        yield "training steps", digest(trace.losses, trace.norms, trace.weights)

    def _bound(self) -> float:
        return run_tolerance(self.precision().activations) if self.tolerance is None else self.tolerance

    @smoke
    def test_its_formats_fit_each_other(self) -> None:
        """They are floating-point formats of torch; masters hold weights; a second call gives the same answer."""
        first = self.precision()
        chosen = next(one for one in self.config().chosen if one.entry == self.entry())
        plugin = installed_plugins().load(self.entry())(chosen.config)
        again = [defined(chosen.label, plugin) for _ in range(2)]
        require(again == [first, first], f"'define_precision' is not pure: it answers {first}, then {again}")

    @smoke
    def test_every_product_of_its_recipe_has_a_supplier(self) -> None:
        """A run that names the precision can be built, and products outside of the base modules follow its recipe."""
        from mplug.model.build import build_model

        precision = self.precision()
        if precision.recipe is None:
            raise SkipTest(f"'{self.plugin}' has no recipe")
        with refusals("a tiny run in this precision", named_by_author=True):
            model = build_model(tiny_run(self.tiny()))
        followed = [filled.site.role for filled in model.slots if precision.recipe.need in filled.site.needs]
        products = [slot.name for slot in model.declared.values() if slot.multiplies]
        require(followed, f"no slot of {listed(products)} follows the recipe '{precision.recipe.name}'")

    def test_training_stays_near_fp64(self) -> None:
        """Losses, gradients and norms of a tiny run are those of fp64 within the tolerance."""
        found, exact = train_steps(self.tiny()), train_steps(self._in_fp64())
        wrong = difference([found], exact, self._bound())
        require(not wrong, f"a tiny run in '{self.plugin}' differs from fp64: {wrong}")

    def test_its_recipe_changes_products(self) -> None:
        """Otherwise a supplier accepts the recipe and computes without it."""
        precision = self.precision()
        if precision.recipe is None:
            raise SkipTest(f"'{self.plugin}' has no recipe")
        found = train_steps(self.tiny())
        from mplug_testing.blueprint import on_meta

        products = (slot for slot in on_meta(tiny_run(self.tiny())).declared.values() if slot.multiplies)
        suppliers = {f"kernels.{slot.kind}" for slot in products}  # without a site to fill, they are refused
        with _without_recipe():
            settings = {name: value for name, value in self.tiny().items() if name not in suppliers}
            plain = train_steps({**settings, "trainer.base_modules": None})
        require(
            found.losses != plain.losses or found.norms != plain.norms,
            f"a run with the recipe '{precision.recipe.name}' has the same bits as a run without it, so its suppliers "
            f"ignore it",
        )

    def test_every_operand_of_its_products_is_rounded(self) -> None:
        """Forward and both gradients of linear layers: the product with a matrix that selects differs from its operand.

        Operands that the recipe leaves as they are stand in `exact`, with the reason.
        """
        import mplug_testing.rounding as rounding
        from mplug_testing.model_checks import Trial

        for operand in self.exact:
            require(
                operand in rounding.OPERANDS, f"`exact` names '{operand}'; operands are {listed(rounding.OPERANDS)}"
            )
        if self.precision().recipe is None:
            raise SkipTest(f"'{self.plugin}' has no recipe, so products compute in its formats")
        trial = Trial.of(self.tiny())
        found = rounding.sites_of_recipe(trial)
        if not found:
            raise SkipTest(
                f"no supplier of {listed(rounding.SLOTS)} follows the recipe, and others cannot be called alone"
            )
        for filled in found:
            as_they_are = set(rounding.exact_operands(trial, filled))
            for operand in rounding.OPERANDS:
                is_exact = operand in as_they_are
                require(
                    is_exact == (operand in self.exact),
                    f"{filled.supplier} does not round the {operand} at '{filled.site.name}'; the recipe rounds all "
                    f"operands, or the suite gives the reason in `exact`"
                    if is_exact
                    else f"the suite's `exact` names the {operand}, and {filled.supplier} rounds it",
                )

    def test_equal_runs_have_equal_bits(self) -> None:
        """Two runs of the same config have the same losses and norms."""
        first, second = train_steps(self.tiny()), train_steps(self.tiny())
        same = (first.losses, first.norms) == (second.losses, second.norms)
        require(same, f"two equal runs have losses {first.losses} and {second.losses}")

    def test_a_layout_gives_the_run_of_one_process(self, layout: str) -> None:
        """Losses, gradients and norms of all ranks are those of one process within the tolerance."""
        from mplug.config.sources import read_assignments

        word, *assignments = layout.split()
        more = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
        settings = {**self.tiny(), "parallel.layout": word, **more}
        with refusals(f"the layout '{layout}'", named_by_author=True):
            ranks = tiny_run(settings).mesh.world_size
            traces = train_ranks(ranks, settings)
        wrong = difference(traces, train_steps(self.tiny()), self._bound())
        require(not wrong, f"under the layout '{layout}', {wrong}")

    @classmethod
    def _in_fp64(cls) -> dict[str, Any]:
        """The settings of the same run in the host's fp64; those of the precision and its kernels do not apply."""
        own = (*cls.naming(), ".".join(cls.section()), "trainer.base_modules")
        rest = {name: value for name, value in cls.tiny().items() if not name.startswith((*own, "kernels."))}
        return {**rest, "trainer.precision": "fp64"}


@contextmanager
def _without_recipe() -> Iterator[None]:
    """Runs of this process compute all products in the formats of their precision."""

    def plain(plugins: dict[str, object]) -> "Precision":
        return replace(precision_among(plugins), recipe=None, base_modules=None)

    with mock.patch("mplug.run.run.precision_among", plain):
        yield
