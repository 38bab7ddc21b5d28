"""The suite for plugins of the kind `objectives`: they compute the loss of a step from the end of a model.

from mplug_testing import ObjectiveSuite

class TestRingo(ObjectiveSuite):
    plugin = "ringo"
    settings = {"objectives.ringo.gamma": 2.0}
    layouts = ("tp2", "cp2")
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar
from warnings import catch_warnings

from mplug.errors import UsageError
from mplug_testing.harness import EXACT, TinySettings, installed_plugins, tiny_run, train_steps
from mplug_testing.parity import require_parity, trained_once
from mplug_testing.suite import PluginSuite, require

if TYPE_CHECKING:
    from mplug.training.assembly import Parts

STEP = 1e-5
"""Half of the distance between the weights at which a loss is compared with its gradient."""
DERIVATIVE = 1e-5
"""The bound of the relative error of a derivative: a difference of losses in fp64 has an error of about STEP ** 2."""


class ObjectiveSuite(PluginSuite):
    """The requirements for objectives.

    - The loss is another one than the model's own.
    - The gradients of a step are those of the loss that it reports.
    - Neither the size of micro batches nor a compiler changes a result.
    - A run under a layout equals the run of one process.

    `layouts` are the layouts under which runs are compared with one process (settings may follow a layout). None means
    every installed strategy alone at degree 2; refused layouts are skipped. `settings` name data with the entries that
    the objective takes.
    """

    kind = "objectives"
    layouts: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """Its own section below `objectives`."""
        return {f"objectives.{cls.plugin}": {}}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`objectives.NAME`."""
        return ("objectives", cls.plugin)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each layout."""
        installed = (f"{name}2" for name in installed_plugins().names("parallel") if "/" not in name)
        layouts = tuple(installed) if self.layouts is None else self.layouts
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", layouts)

    @classmethod
    def evidence(cls, settings: TinySettings) -> Iterator[tuple[str, Any]]:
        """Losses, figures and gradients of two steps."""
        from mplug_testing.fields import digest

        trace = train_steps({"kernels.default": None, **settings})
        yield "training steps", digest(trace.losses, trace.gradients, trace.statistics)

    def test_it_computes_another_loss_than_the_model(self) -> None:
        """Otherwise naming the plugin has no effect."""
        section = f"objectives.{self.plugin}"
        own = {name: v for name, v in self.tiny().items() if name != section and not name.startswith(f"{section}.")}
        try:
            (plain,) = trained_once(own)
        except UsageError:  # no other objective takes the entries of these data
            return
        (found,) = trained_once(self.tiny())
        require(found.losses != plain.losses, f"the losses with '{self.plugin}' are those of the model's own loss")

    def test_the_gradients_are_those_of_the_loss(self) -> None:
        """Along a random direction, the loss rises as the gradients say, in the second step of a run."""
        import torch

        from mplug.model.pieces import write_weights
        from mplug.training.assembly import build
        from mplug_testing.harness import in_fp64

        def total(parts: "Parts") -> tuple[float, float]:
            """The sum of the losses, and its derivative; the update may change the gradients."""
            parts.stepper.forward_backward(parts.train_loader.step_of(batches), 2)
            slopes = [float((way * piece.gradient).sum()) for way, piece in zip(ways, parts.pieces, strict=True)]
            result = parts.stepper.update(0.0, 0.0)
            return float(result.loss) * float(result.tokens), sum(slopes)

        run = tiny_run(in_fp64(self.tiny()))
        parts, size = build(run), run.config.trainer.global_batch_size
        parts.stepper.forward_backward(parts.train_loader.take(size), 1)
        parts.stepper.update(0.01, 0.0)
        batches = [*parts.train_loader.loader.take(size)]
        generator = torch.Generator().manual_seed(1)
        ways = [torch.randn(piece.master.shape, dtype=torch.float64, generator=generator) for piece in parts.pieces]
        _, expected = total(parts)
        losses = []
        for step in (STEP, -2 * STEP):
            for way, piece in zip(ways, parts.pieces, strict=True):
                piece.master.add_(way, alpha=step)
            write_weights(parts.pieces)
            losses.append(total(parts)[0])
        found = (losses[0] - losses[1]) / (2 * STEP)
        require(
            abs(found - expected) <= DERIVATIVE * abs(expected),
            f"the loss changes by {found:.9g} along a direction, and its gradients say {expected:.9g}",
        )

    def test_neither_micro_batches_nor_a_compiler_change_a_result(self) -> None:
        """Beside the run of the suite: micro batches of one sample, and units that a compiler traces."""
        from mplug_testing.harness import difference

        (reference,) = trained_once(self.tiny())
        for changes in ({"trainer.micro_batch_size": 1}, {"trainer.compile": "aot_eager"}):
            with catch_warnings(action="ignore"):  # warnings of torch's tracer do not concern the plugin
                found = trained_once({**self.tiny(), **changes})
            message = difference(found, reference, EXACT)
            require(not message, f"with {changes}: {message}")

    def test_a_layout_computes_what_one_process_does(self, layout: str) -> None:
        """Losses, gradients and weights within 1e-10 in fp64."""
        require_parity(self.tiny(), layout, named_by_author=self.layouts is not None)
