"""The suite for kernels.

A kernel's author subclasses it in a test module:

    from mplug_testing import KernelSuite

    class TestRingo(KernelSuite):
        plugin = "ringo"
        settings = {"kernels.ringo.block": 16}

The cases are in `kernel_cases`, the checks that run on each case in `kernel_checks.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import UsageError, listed
from mplug.model.slots.fill import known_slots, refuse_unknown_slots
from mplug.model.slots.offers import Filled, Offer, Site
from mplug_testing.harness import difference, run_tolerance, tiny_run, train_steps
from mplug_testing.kernel_buffers import BufferChecks, answer_of, declared_by, sites_of
from mplug_testing.kernel_functions import FunctionChecks, case_name
from mplug_testing.kernel_packed_heads import PackedHeadsChecks
from mplug_testing.suite import Fault, PluginSuite, naming_failures, refusals, require, smoke

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_nn.parts import AttentionParts
    from mplug_testing.capabilities import Setting
    from mplug_testing.kernel_cases import Case
    from mplug_testing.kernel_checks import Trial


class KernelSuite(BufferChecks, FunctionChecks, PackedHeadsChecks, PluginSuite):
    """Compares every slot that a kernel supplies, over a grid of cases, with the composition of `mplug_nn` in fp64.

    `dtypes` are the values of `trainer.precision` to try; products follow the recipe of a precision that has one. The
    kernel must serve each slot that it supplies in at least one of them; the suite checks it in all that it serves.
    `settings` may name a device or a compiler. An error may be `error_factor` times the error of plain torch in the
    same dtype, without a recipe. `deterministic` False skips the test that equal calls give equal bits; `compiles`
    False skips the test that calls trace into one graph. `capabilities` are what wraps can require. If the
    offer serves one other than these two, override `check_capability`.

    If the kernel's attention core computes another function than softmax attention, set `computes` to the need by which
    sites request that function, and override `reference`. `settings` must then name a model that has such sites, with
    the same function as their own core. The suite compares the run with the kernel with the run with that core.
    """

    kind = "kernels"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    error_factor: ClassVar[float] = 4.0
    deterministic: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    capabilities: ClassVar[tuple[str, ...]] = ("log-sum-exp", "parts by position")

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """The plugin is the default kernel: it fills every slot that it can."""
        return {"kernels.default": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """Its section is in 'kernels'."""
        return ("kernels", cls.plugin.rpartition("/")[2])

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test that has an argument `dtype` once per dtype."""
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

    def check_capability(self, need: str, site: Site, offer: Offer) -> None:
        """Raise Fault unless the offer has a capability that it serves at a site.

        This method checks attention by parts: the log-sum-exp, and parts by position. The plugin's author must write
        the checks of other capabilities.
        """
        from mplug_nn import AttentionCore
        from mplug_nn.specification import CAPABILITIES

        core, found = offer.suppliers[site.slot], ""
        if need in CAPABILITIES and isinstance(core, AttentionCore) and core.parts is not None:
            found = self._parts_fault(need, core.parts, site, offer)
        else:
            found = "this suite cannot check it; refuse the need, or override check_capability"
        require(not found, f"supports returns True for a site that needs '{need}', and {found}")

    def _parts_fault(self, need: str, parts: "AttentionParts", site: Site, offer: Offer) -> str:
        from mplug_testing.capabilities import parts_fault, placed_parts_fault

        run, _ = self._offered()
        packed = offer.answer(replace(site, needs=site.needs | {"document_lengths"}), run) is True
        fault = parts_fault if need == "log-sum-exp" else placed_parts_fault
        return fault(parts, self._setting(site), packed)

    def _setting(self, site: Site) -> "Setting":
        from mplug_testing.capabilities import Setting

        run, _ = self._offered()
        heads = (site.module.num_heads, site.module.num_kv_heads, site.module.head_dim)
        return Setting(*heads, run.precision.activation_dtype, run.device)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The slots that it fills; the operations of a step, its loss and gradients; and two steps of training."""
        import torch

        from mplug.model.build import build_model, choose_device

        run = tiny_run({"trainer.precision": cls.dtypes[0], **settings})
        with refusals("the device of this suite's runs", named_by_author=False):
            device = choose_device(run.config)
        filled = [one for one in build_model(run).slots if one.supplier == cls.entry().label]
        yield "slots", [(one.site.name, one.site.slot, one.supplier_label(run)) for one in filled]
        if device == "cpu" or torch.cuda.is_available():
            from mplug_testing.operations import step_seen

            operations, numbers = step_seen({"trainer.precision": cls.dtypes[0], **settings})
            yield "operations", operations
            yield "gradients", numbers
            trace = train_steps({"trainer.precision": cls.dtypes[0], **settings})
            yield "training steps", (trace.losses, trace.norms)

    # What it offers.

    @smoke
    def test_it_offers_suppliers_of_slots(self) -> None:
        """It offers at least one supplier, for slots that exist."""
        from mplug_testing.blueprint import on_meta

        run, offers = self._offered()
        require(any(offer.suppliers for offer in offers), f"'{self.plugin}' offers no supplier of any slot")
        with refusals("an offer", named_by_author=True):
            refuse_unknown_slots(offers, known_slots(on_meta(run)))

    @smoke
    def test_supports_is_a_pure_function_with_three_answers(self) -> None:
        """`supports` returns True, False or a reason; a second call returns the same.

        No call changes the site's module.
        """
        run, offers = self._offered()
        for offer, case, site in self._sites(run, offers):
            before = dict(vars(case.module))
            first, again = (answer_of(offer, site, run) for _ in range(2))
            require(
                first == again,
                f"supports is not pure: for {case_name(case, site)} it returns {first!r}, then {again!r}",
            )
            after = vars(case.module)
            changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
            require(not changed, f"supports is not pure: it changes {listed(sorted(changed))} of the site's module")
            varies = offer.varies(site, run)
            require(isinstance(varies, str), f"varies returns {varies!r} for {case_name(case, site)}; return a string")
            note = offer.note(site, run) if first is True else ""
            require(isinstance(note, str), f"note returns {note!r} for {case_name(case, site)}; return a string")

    @smoke
    def test_its_suppliers_own_no_parameter_and_no_module(self) -> None:
        """A supplier receives its tensors as arguments; the host places and saves them with the site."""
        from mplug_testing.kernel_checks import owned_by

        for offer in self._offered()[1]:
            for slot, supplier in offer.suppliers.items():
                owned = owned_by(supplier)
                require(not owned, f"the supplier of {slot} owns {owned}; take it from the arguments")

    def test_all_sites_of_a_role_share_one_callable(self) -> None:
        """One callable per site would be compiled once per block."""
        shared: dict[tuple[str, str], set[int]] = {}
        for filled in self._filled():
            supplier = getattr(filled.site.module, filled.site.slot.rpartition(".")[2])
            shared.setdefault((filled.site.role, filled.site.slot), set()).add(id(supplier))
        for (role, slot), suppliers in shared.items():
            require(
                len(suppliers) == 1,
                f"the sites '{role}' have {len(suppliers)} callables in {slot}; all sites of a role must share one",
            )

    # The results of its suppliers.

    def test_values_and_gradients_are_those_of_plain_torch(self, dtype: str) -> None:
        """For every case that it supports, including shapes and dtypes."""
        self._try(dtype, lambda trial: trial.values_fault(self.error_factor))

    def test_its_reference_is_a_core(self) -> None:
        """The author's reference has the right shape, is finite, differentiable and causal."""
        if not self.computes:
            raise SkipTest(f"the reference of '{self.plugin}' is plain torch")
        self._try(self.dtypes[0], lambda trial: trial.reference_fault(), only="Attention.core")

    def test_tensors_that_are_not_contiguous_give_the_same(self, dtype: str) -> None:
        """Activations are often views of wider tensors, and gradients may have any strides."""
        how = ", with tensors that are not contiguous"
        self._try(dtype, lambda trial: trial.strided_fault(self.error_factor), how=how)

    def test_inputs_are_left_as_they_were(self, dtype: str) -> None:
        """It writes no input in place, except the gradient sink: other code still reads the inputs."""
        self._try(dtype, lambda trial: trial.in_place_fault())

    def test_the_same_call_gives_the_same_bits(self, dtype: str) -> None:
        """In forward and backward."""
        if not self.deterministic:
            raise SkipTest(f"'{self.plugin}' sets deterministic = False")
        self._try(dtype, lambda trial: trial.repeated_fault())

    def test_attention_is_causal(self, dtype: str) -> None:
        """No query sees a later key, in forward or backward. The test is exact, without a tolerance."""
        self._try(dtype, lambda trial: trial.acausal_fault(), only="Attention.core")

    def test_a_dropout_of_its_own_drops_as_often_as_asked(self) -> None:
        """If `varies` reports that the mask does not follow the samples' keys, the mask must be right on average."""
        from mplug_testing.kernel_checks import own_dropout_fault

        run, offers = self._offered()
        own = [
            (offer, site)
            for offer, case, site in self._sites(run, offers)
            if case.dropout and answer_of(offer, site, run) is True and offer.varies(site, run)
        ]
        if not own:
            raise SkipTest(f"'{self.plugin}' draws no dropout mask itself")
        for offer, site in own:
            dtype, core = run.precision.activation_dtype, offer.suppliers[site.slot]
            found = own_dropout_fault(core, site.module.dropout, run.device, dtype)
            require(not found, f"{site.slot}: {found}")

    def test_it_traces_into_one_graph(self) -> None:
        """Forward and backward of the first case of each slot, in the first dtype in which the kernel serves it."""
        if not self.compiles:
            raise SkipTest(f"'{self.plugin}' sets compiles = False")
        tried = set()
        for trial in chain.from_iterable(map(self._trials, self.dtypes)):
            if trial.case.slots not in tried:
                tried.add(trial.case.slots)
                found = trial.compiled_fault(self.error_factor)
                require(not found, found)

    def test_it_has_the_capabilities_that_it_grants(self) -> None:
        """Each capability for which `supports` returns True."""
        run, offers = self._offered()
        for offer, case, site in self._sites(run, offers):
            for need in () if case.needs - {self.computes} else self.capabilities:
                wanting = replace(site, needs=site.needs | {need})
                if answer_of(offer, wanting, run) is True:
                    self.check_capability(need, wanting, offer)

    def test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch(self) -> None:
        """A tiny training run in the first of `dtypes`: losses, gradients and norms of every step."""
        self._filled()
        precision = self.dtypes[0]
        if tiny_run(self.tiny(trainer__precision=precision)).precision.recipe is not None:
            raise SkipTest(f"plain torch has no recipe; a PrecisionSuite compares the runs in '{precision}' with fp64")
        plain = train_steps(self.tiny(trainer__precision=precision, kernels__default=None))
        tolerance = run_tolerance(tiny_run(self.tiny(trainer__precision=precision)).precision.activations)
        found = difference([train_steps(self.tiny(trainer__precision=precision))], plain, tolerance)
        require(not found, f"in a tiny run with '{self.plugin}' instead of plain torch, {found.partition(';')[0]}")

    # Shared by the tests.

    def _offered(self, dtype: str | None = None) -> "tuple[Run, list[Offer]]":
        """The tiny run in a dtype, and the kernel's offers for it."""
        import torch

        from mplug.model.build import choose_device, collect_offers

        run = tiny_run(self.tiny(trainer__precision=dtype or self.dtypes[0]))
        with refusals("the device of this suite's runs", named_by_author=False):  # skips if this machine lacks it
            run.device = choose_device(run.config)
        with torch.device("meta"):
            model = run.hooks.call.build_model(run=run)
        model.place(run.mesh, None)
        with naming_failures("the hook 'offer'"):
            offers = collect_offers(run, model)
        return run, [offer for offer in offers if isinstance(offer, Offer) and offer.plugin == self.entry().label]

    def _sites(self, run: "Run", offers: list[Offer]) -> "Iterator[tuple[Offer, Case, Site]]":
        """Every case of every offered slot; products need the recipe of the run's precision."""
        from mplug_testing.kernel_cases import cases

        self._require_named_function()
        recipe = run.precision.recipe
        for case in cases():
            if self.computes and "Attention.core" in case.slots:
                case = replace(case, needs=case.needs | {self.computes}, truth={"Attention.core": self.reference})
            for offer, site in product(offers, sites_of(case)):
                if site.slot in offer.suppliers:
                    needs = {recipe.need} if recipe is not None and site.declared.multiplies else set()
                    yield offer, case, replace(site, needs=site.needs | needs)

    def _trials(self, dtype: str, only: str | None = None) -> "list[Trial]":
        """The cases that it supports in a dtype; Fault for a slot of which it supports no case in any of `dtypes`."""
        trials, refusals = self._trials_and_refusals(dtype, only)
        for slot, reasons in refusals.items():
            other_dtypes = [other for other in self.dtypes if other != dtype]
            checked = slot in trials or any(slot in self._trials_and_refusals(other, slot)[0] for other in other_dtypes)
            hint = self._about_computes() if slot == "Attention.core" else ""
            require(checked, f"supports refuses every case of {slot}, so none can be checked: {listed(reasons)}{hint}")
        return [*chain.from_iterable(trials.values())]

    def _trials_and_refusals(
        self, dtype: str, only: str | None
    ) -> "tuple[dict[str, list[Trial]], dict[str, list[str]]]":
        """The trials of every slot (or of slot `only`), and the refusals of the other cases."""
        from mplug_testing.kernel_checks import Trial

        run, offers = self._offered(dtype)
        trials: dict[str, list[Trial]] = {}
        refusals: dict[str, dict[str, None]] = {}
        for offer, case, site in self._sites(run, offers):
            if only not in (None, site.slot):
                continue
            answer = answer_of(offer, site, run)
            if answer is not True:
                refusals.setdefault(site.slot, {})[str(answer or "False")] = None
            elif case.dropout == 0 or not offer.varies(site, run):
                suppliers, where = {**case.plain, **offer.suppliers}, f"{case_name(case, site)}, {dtype}"
                dtype_of, declared = run.precision.activation_dtype, declared_by(offer, case)
                trial = Trial(case, suppliers, dtype_of, run.device, where, declared)
                trials.setdefault(site.slot, []).append(trial)
        return trials, {slot: list(reasons) for slot, reasons in refusals.items()}

    def _try(self, dtype: str, check: "Callable[[Trial], str]", only: str | None = None, how: str = "") -> None:
        """Run a check in all trials."""
        trials = self._trials(dtype, only)
        if not trials:
            raise SkipTest(f"'{self.plugin}' supplies no {only or 'slot'} in {dtype}")
        for trial in trials:
            trial = replace(trial, where=f"{trial.where}{how}")
            with naming_failures(trial.where):
                found = check(trial)
            require(not found, found)

    def _filled(self) -> list[Filled]:
        """The slots that it fills in the tiny run's model, as 'mplug explain' shows them."""
        from mplug.model.build import build_model

        self._offered()  # skips if this machine lacks the device of the settings
        label = self.entry().label
        try:
            slots = build_model(tiny_run(self.tiny(trainer__precision=self.dtypes[0]))).slots
        except UsageError as error:
            raise Fault(f"a tiny run that names the kernel is refused: {error}") from None
        filled = [slot for slot in slots if slot.supplier == label]
        suppliers = listed(sorted({slot.supplier for slot in slots}))
        hint = f"; do the suite's settings name a model whose sites need '{self.computes}'?" if self.computes else ""
        require(filled, f"'{label}' fills no slot of a run that names it; {suppliers} fill its slots{hint}")
        return filled
