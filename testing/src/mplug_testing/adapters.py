"""The suite for plugins of the kind `adapters`: they add modules to a model, and freeze most of its parameters.

from mplug_testing import AdapterSuite

class TestRingo(AdapterSuite):
    plugin = "ringo"
    settings = {"adapters.ringo.rank": 2}
    layouts = ("tp2", "fsdp2")
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from unittest import SkipTest

from mplug.registry.hooks import implemented
from mplug_testing.harness import EXACT, TinySettings, installed_plugins, tiny_run
from mplug_testing.parity import require_parity, trained_once
from mplug_testing.suite import PluginSuite, require


class AdapterSuite(PluginSuite):
    """The requirements for adapters.

    - The parameters of the model keep their names, shapes and values. Frozen ones have no gradient and do not change.
    - The adapters are trained: each has a gradient within two steps.
    - An exported model computes what the adapted model computes.
    - If the plugin implements `captures`, replayed steps are steps.
    - A run under a layout equals the run of one process.

    `models` maps names to settings of further models, besides that of `settings`. `layouts` are the layouts under which
    runs are compared with one process (settings may follow a layout). None means every installed strategy alone at
    degree 2; refused layouts are skipped.
    """

    kind = "adapters"
    models: ClassVar[Mapping[str, TinySettings]] = {}
    layouts: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """Its own section below `adapters`."""
        return {f"adapters.{cls.plugin}": {}}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`adapters.NAME`."""
        return ("adapters", cls.plugin)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each model and layout."""
        installed = (f"{name}2" for name in installed_plugins().names("parallel") if "/" not in name)
        layouts = tuple(installed) if self.layouts is None else self.layouts
        for name, values in {"model": ("tiny", *self.models), "layout": layouts}.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    @classmethod
    def with_model(cls, model: str) -> dict[str, Any]:
        """The settings of a run with a model."""
        return {**cls.tiny(), **cls.models.get(model, {})}

    @classmethod
    def without(cls, settings: TinySettings) -> dict[str, Any]:
        """The same run without the plugin."""
        section = f"adapters.{cls.plugin}"
        return {name: v for name, v in settings.items() if name != section and not name.startswith(f"{section}.")}

    @classmethod
    def evidence(cls, settings: TinySettings) -> Iterator[tuple[str, Any]]:
        """Which parameters there are, and which are trained; loss, gradients and logits; and two steps of training."""
        from mplug.model.build import build_model
        from mplug_testing.fields import digest
        from mplug_testing.harness import train_steps
        from mplug_testing.model_checks import Trial

        placements = build_model(tiny_run(settings)).placements
        yield "parameters", sorted((name, one.shape, repr(one.parameter)) for name, one in placements.items())
        trial = Trial.of({"trainer.precision": "fp64", **settings})
        trial.shake()
        yield "losses and gradients", digest(trial.loss(trial.batches[0]), trial.gradients(trial.batches[:1]))
        trace = train_steps({"kernels.default": None, **settings})
        yield "training steps", digest(trace.initial, trace.losses, trace.weights)

    def test_it_adapts_models(self) -> None:
        """Otherwise naming the plugin has no effect."""
        hooks = set(implemented(installed_plugins().load(self.entry())))
        require("adapt_model" in hooks, f"'{self.plugin}' does not implement the hook 'adapt_model'")

    def test_the_model_keeps_its_parameters(self, model: str) -> None:
        """By name, shape and initial value; and every added parameter has a meaning in the plan."""
        import torch

        settings = self.with_model(model)
        (found,), (plain,) = (trained_once(one) for one in (settings, self.without(settings)))
        for name, boxes in plain.initial.items():
            require(name in found.initial, f"the model has no parameter '{name}' with the plugin")
            same = all(torch.equal(a[1], b[1]) for a, b in zip(found.initial[name], boxes, strict=True))
            require(same, f"'{name}' has another initial value with the plugin")

    def test_only_what_is_trained_changes(self, model: str) -> None:
        """Frozen parameters keep their bits, and each trained one has a gradient that is not zero within two steps."""
        import torch

        from mplug.model.build import build_model

        settings = self.with_model(model)
        (trace,) = trained_once(settings)
        placements = build_model(tiny_run(settings)).placements
        trained = {name for name, one in placements.items() if one.parameter.trainable}
        require(trained < placements.keys(), "the plugin freezes no parameter")
        for name in placements.keys() - trained:
            pairs = zip(trace.weights[name], trace.initial[name], strict=True)
            require(all(torch.equal(a[1], b[1]) for a, b in pairs), f"'{name}' is frozen, and its values change")
        for name in sorted(trained):
            seen = any(bool(values.any()) for step in trace.gradients for _, values in step.get(name, []))
            require(seen, f"'{name}' is trained, and its gradient is zero in every step; no unit computes with it")

    def test_an_export_computes_what_the_adapted_model_computes(self, model: str) -> None:
        """The model without the plugin, with the weights that `model.merges` computes, has the same logits."""
        from mplug_testing.model_checks import Trial

        settings = {"trainer.precision": "fp64", **self.with_model(model)}
        adapted, plain = Trial.of(settings), Trial.of(self.without(settings))
        adapted.shake()
        weights, merges = adapted.model.parameters(), adapted.model.merges
        merged = {name for merge in merges.values() for name in merge.inputs}
        lost = sorted(weights.keys() - plain.model.parameters().keys() - merged)
        if lost:
            raise SkipTest(f"no entry of model.merges has '{lost[0]}', so mplug refuses to export the model")
        for name, parameter in plain.model.parameters().items():
            inputs = [weights[one].data for one in merges[name].inputs] if name in merges else []
            parameter.data.copy_(merges[name].compute(*inputs) if name in merges else weights[name].data)
        for trial in (adapted, plain):
            trial.model.module.eval()
        found, expected = (trial.logits(trial.batches[0]) for trial in (adapted, plain))
        error = float((found - expected).abs().max() / expected.abs().max())
        require(
            error <= EXACT,
            f"an exported model has other logits than the run (relative difference {error:.1e}): `model.merges` must "
            f"compute the weights that have the effect of the adapters, and a module that the plugin replaces must "
            f"compute what the replaced one computes",
        )

    def test_replayed_steps_are_steps(self) -> None:
        """If the plugin states by `captures` that its part can be replayed, no number of the CPU enters it."""
        import mplug_testing.replays as replays

        if not replays.is_stated(tiny_run(self.tiny()), self.entry().label):
            raise SkipTest(f"'{self.plugin}' does not state that its part of a step can be replayed")
        fault = replays.model_replay_fault(self.tiny())
        require(
            not fault,
            f"it states 'captures', and {fault}; read what changes from step to step from tensors",
        )

    def test_a_run_under_a_layout_is_that_of_one_process(self, layout: str) -> None:
        """Losses, gradients, norms and weights in fp64, to rounding."""
        require_parity(self.tiny(), layout, named_by_author=self.layouts is not None)
