"""The suite for model families."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from unittest import SkipTest

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.errors import UsageError
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug_testing.harness import installed_plugins, tiny_run
from mplug_testing.suite import Fault, PluginSuite, smoke

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.layout.work import Flops
    from mplug.model.model import Model
    from mplug_testing.model_checks import Trial


class ModelSuite(PluginSuite):
    """The requirements for a model family: its plan describes its modules correctly, under any layout.

    `settings` must make the model tiny (a few layers, a width of 32, a vocabulary of a few hundred). The features that
    they enable (dropout, tied embeddings) are tested.

    `layouts` are the layouts whose runs must equal that of one process; a refusal of one of them is a fault. None means
    one rank, every installed strategy alone at degree 2, and every pair of them at 2 x 2; refused layouts are skipped.
    Settings may follow a layout, as on the command line: "tp2 parallel.tp.sequence_parallel=false".
    """

    kind = "models"
    layouts: ClassVar[tuple[str, ...] | None] = None
    positions: ClassVar[Literal["relative", "absolute", "ignored"] | None] = None
    """What the entry 'positions' means to the model.

    'relative': positions that are all shifted by one number give the same losses. 'absolute': they give others.
    'ignored': the units take the entry, and no loss depends on it. None: it is not tested which of the first two.
    """
    smooth: ClassVar[bool] = True
    """Gradients are the derivatives of the loss. False for a model that rounds on purpose."""
    causal: ClassVar[bool] = True
    """No logit depends on a later token. False for an encoder, which is not sampled from."""

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """`model.name`."""
        return {"model.name": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """The section 'model'."""
        return ("model",)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test that has an argument `layout` once per layout."""
        if "layout" in metafunc.fixturenames:
            layouts = self.layouts if self.layouts is not None else tuple(layouts_of_installed_strategies())
            metafunc.parametrize("layout", layouts, ids=[layout or "one_rank" for layout in layouts])

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The plan without its FLOPs; loss and gradients of a micro batch in fp64; and two steps of training."""
        import mplug_testing.blueprint as blueprint
        from mplug_testing.fields import digest
        from mplug_testing.harness import train_steps
        from mplug_testing.model_checks import Trial

        yield "plans", blueprint.described(blueprint.on_meta(tiny_run(settings)))
        trial = Trial.of({"trainer.precision": "fp64", **settings})
        trial.shake()
        gradients = trial.gradients(trial.batches[:1])
        yield "losses and gradients", digest(trial.loss(trial.batches[0]), gradients)
        trace = train_steps({"kernels.default": None, **settings})
        yield "training steps", digest(trace.losses, trace.norms, trace.weights)

    # Without memory.

    def on_meta(self) -> "Model":
        """The model of the suite's settings, as the hook `build_model` returns it on the meta device."""
        import mplug_testing.blueprint as blueprint

        return blueprint.on_meta(tiny_run(self.tiny()))

    @smoke
    def test_it_is_built_on_the_meta_device(self) -> None:
        """Building allocates no memory and draws no random numbers: the host does both later, from the plan."""
        import mplug_testing.blueprint as blueprint

        blueprint.require_meta_build(tiny_run(self.tiny()))

    @smoke
    def test_its_plan_covers_exactly_its_parameters(self) -> None:
        """Each parameter has one pattern with its shape, one unit, and the ties that the plan names."""
        import mplug_testing.blueprint as blueprint

        blueprint.require_covered(self.on_meta())

    @smoke
    def test_its_units_fit_together(self) -> None:
        """Each unit's inputs exist and its outputs have named axes. The last units return the loss, or logits."""
        import mplug_testing.blueprint as blueprint

        blueprint.require_fitting_units(self.on_meta())

    @smoke
    def test_its_presets_are_valid(self) -> None:
        """A run with any preset is accepted."""
        presets = getattr(installed_plugins().load(self.entry()), "presets", {})
        if not presets:
            raise SkipTest(f"'{self.plugin}' has no presets")
        for name in presets:
            try:
                own = from_mapping({"name": self.plugin, "preset": name}, "the suite", ("model",))
                prepare(resolve(installed_plugins(), default_settings(), own))
            except UsageError as error:
                raise Fault(f"a run with the preset '{name}' is refused: {error}") from None

    @smoke
    def test_an_attention_core_of_its_own_is_asked_for(self) -> None:
        """If a module's own core is another function than its specification, its sites need that function by name."""
        import mplug_testing.blueprint as blueprint

        blueprint.require_own_cores(self.on_meta())

    @smoke
    def test_its_external_names_cover_it(self) -> None:
        """If it has a published form, each element has one place in a published checkpoint, and the reverse.

        The family also reads the config.json that it writes.
        """
        from mplug_testing.published import require_published

        require_published(tiny_run(self.tiny()), self.on_meta())

    @smoke
    def test_its_published_forms_are_tables(self) -> None:
        """If it has `public_forms`, every setting in them exists and is decided once, and every field is used."""
        from mplug_testing.published import require_tables

        require_tables(installed_plugins().load(self.entry()))

    # With memory, in one process.

    def trial(self, **changes: Any) -> "Trial":
        """The model of the suite's settings with initial values and micro batches."""
        from mplug_testing.model_checks import Trial

        return Trial.of(self.tiny(**changes))

    def test_the_plan_names_the_axes_of_all_that_flows(self) -> None:
        """Every entry and activation has one axis per dimension, and equal axes have equal lengths."""
        self.trial().require_named_axes()

    def test_a_seed_gives_one_model_and_one_loss(self) -> None:
        """Bitwise, independent of torch's own generator. Another seed gives another model."""
        one, same = self.trial(), self.trial()
        other = self.trial(trainer__seed=one.run.config.trainer.seed + 1)
        one.require_same_beginning(same)
        one.require_other_beginning(other)
        one.require_same_loss_whatever_torch_draws()

    def test_its_loss_is_a_sum_with_a_count(self) -> None:
        """Over the targets of a micro batch, without ignored labels."""
        self.trial().require_sum_with_count()

    def test_every_trained_parameter_gets_a_gradient(self) -> None:
        """The gradient is finite and not zero."""
        self.trial().require_gradients()

    def test_what_is_frozen_changes_no_other_gradient(self) -> None:
        """Gradients of trained parameters flow through frozen ones."""
        from mplug_testing.blueprint import units_with_parameters

        whole = self.trial()
        names = units_with_parameters(whole.model)
        if len(names) < 2:
            raise SkipTest("the plan has one unit with parameters, so that freezing it leaves nothing to train")
        whole.shake()
        expected = whole.gradients(whole.batches[:1])
        for frozen in (names[::2], names[1::2]):
            self.trial(model__frozen=frozen).require_gradients_of(expected, frozen)

    def test_its_gradients_are_differences_of_its_loss(self) -> None:
        """Along directions in the parameters of every unit, and in the inputs of one unit of every role, in fp64."""
        import mplug_testing.derivatives as derivatives

        if not self.smooth:
            raise SkipTest("the suite sets smooth = False")
        derivatives.require_gradients_of_the_loss(self.trial(trainer__precision="fp64"))
        derivatives.require_gradients_of_inputs(self.trial(trainer__precision="fp64"))

    def test_it_computes_what_its_reference_computes(self) -> None:
        """Logits, and gradients of the loss: only the author knows which tensor each block should read."""
        if type(self).reference is ModelSuite.reference:
            raise SkipTest(
                "needs a reference: override `reference` with the model's logits in plain torch; without it the suite "
                "cannot see whether each block reads the right tensor"
            )
        self.trial(trainer__precision="fp64").require_reference(self.reference)

    def reference(self, weights: "Mapping[str, Tensor]", batch: "Mapping[str, Tensor]", config: Any) -> "Tensor":
        """The logits [B, S, V] in fp64, written as plainly as possible; `config` is the family's config.

        `weights` are the parameters and the saved buffers by name, `batch` the entries of a micro batch. If the result
        is differentiable, the suite compares the gradients, too. Dropout does not apply.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `reference`: the logits in plain torch")

    def test_it_reads_positions_as_it_declares(self) -> None:
        """Positions in the reverse order, and shifted ones, change the losses, or do not, as `positions` declares."""
        from mplug_testing.cutting import require_positions

        require_positions(self.trial(trainer__precision="fp64"), self.positions)

    def test_documents_of_a_packed_sample_are_apart(self) -> None:
        """Cut out of the sample, each document has the losses that it has in the sample."""
        from mplug_testing.cutting import require_documents_apart

        require_documents_apart(self.tiny(trainer__precision="fp64"))

    def test_gradients_of_two_micro_batches_add_up_in_the_sinks(self) -> None:
        """The model keeps no state of one micro batch for the next."""
        self.trial().require_accumulation()

    def test_replayed_steps_are_steps(self) -> None:
        """If the plugin states by `captures` that its steps can be replayed, no number of the CPU enters them."""
        import mplug_testing.replays as replays

        run = tiny_run(self.tiny())
        if not replays.is_stated(run, self.entry().label):
            raise SkipTest(f"'{self.plugin}' does not state that its steps can be replayed")
        if run.config.trainer.device != "cpu":
            raise SkipTest("the suite replays steps on the CPU only")
        fault = replays.model_replay_fault(self.tiny())
        if fault:
            raise Fault(
                f"its plugin states 'captures', and {fault}; read what changes from step to step from tensors, and "
                f"change state in place"
            )

    def test_evaluation_draws_no_random_numbers(self) -> None:
        """Neither from torch's generator nor from the samples' keys."""
        self.trial().require_quiet_evaluation()

    def test_the_loss_is_the_cross_entropy_of_the_logits(self) -> None:
        """The inference units end in the logits from which the training units compute the loss."""
        self.trial().require_logits_of_the_loss()

    def test_a_later_token_changes_no_earlier_logit(self) -> None:
        """Every token changes the logits from its own position on; without `causal`, also those before it."""
        if self.causal:
            self.trial().require_causal_logits()
        else:
            self.trial().require_logits_of_later_tokens()

    def test_its_flops_are_those_of_its_matrix_products(self) -> None:
        """The plan's FLOPs are three times those of the matrix products of a forward pass."""
        from mplug_testing.model_flops import require_flops

        require_flops(self.trial(), self.core_flops)

    def core_flops(self, q: Any, k: Any, v: Any, spec: Any) -> "Flops":
        """The FLOPs of one call of an attention core, forward and backward, per token and per squared length.

        q [B, S, H, K], k [B, T, G, K], v [B, T, G, V] and an `AttentionSpec`. Override this if sites need another
        function than softmax attention. Count the algorithm that costs least for long sequences.
        """
        raise NotImplementedError("override 'core_flops' of the suite: the FLOPs of one call of the core")

    def test_what_its_modules_mix_is_declared(self) -> None:
        """A change of one token of one sample affects others only through attention and the axes that `mixes` names."""
        from mplug_testing.mixing import require_declared_mixing

        require_declared_mixing(self.trial(trainer__precision="fp64"))

    def test_sampling_with_a_cache_is_exact(self) -> None:
        """If all modules declare that they serve a cache, its logits are those of the whole text, with padding too.

        A model that is not `causal` is not sampled from.
        """
        from mplug_testing.cached import require_exact_cache, require_refused_sampling

        if self.causal:
            require_exact_cache(self.tiny())
        else:
            require_refused_sampling(self.tiny())

    # Under layouts.

    def test_a_layout_gives_the_run_of_one_process(self, layout: str) -> None:
        """Losses, all gradients and the gradient norm of every step equal those of one process."""
        from mplug_testing.parity import require_parity

        require_parity(self.tiny(), layout, named_by_author=self.layouts is not None or not layout)


def layouts_of_installed_strategies() -> Iterator[str]:
    """One rank (the empty layout), every installed strategy alone at degree 2, and every pair at 2 x 2."""
    names = [f"{name}2" for name in installed_plugins().names("parallel") if "/" not in name]
    yield ""
    yield from names
    yield from map("".join, combinations(names, 2))
