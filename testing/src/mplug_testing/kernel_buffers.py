"""The part of the suite for kernels that checks declared buffers, and the answers of `supports`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.model.slots.offers import Offer, Site
from mplug.model.slots.slot_buffer import SlotBuffer
from mplug_testing.suite import naming_failures, require

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_testing.kernel_cases import Case


class BufferChecks:
    """The tests of `Offer.buffers`."""

    plugin: str
    compiles: ClassVar[bool] = True

    def test_its_buffers_are_what_it_declares(self, dtype: str) -> None:
        """Statistics of parts combine to those of the whole, and all state is in states that `step_ended` changes."""
        from mplug.registry.precisions import precision_named
        from mplug_testing.fused import kind_of
        from mplug_testing.grouped import PRODUCT, WEIGHTS
        from mplug_testing.kernel_buffer_checks import SLOTS, BufferTrial, site_of

        run, offers = self._offered(dtype)
        keeping = [
            (offer, slot)
            for offer in offers
            for slot in SLOTS
            if slot in offer.suppliers and offer.buffers(site_of(slot, 32, 16))
        ]
        if not keeping:
            raise SkipTest(f"'{self.plugin}' declares no buffers")
        for offer, slot in keeping:
            kind = kind_of(slot, partial(_computes, offer, site_of(slot, 32, 16), run))
            for part in WEIGHTS if slot == PRODUCT else (kind,):
                where = f"the buffers of {slot}, {dtype}" + (f", '{part}'" if slot == PRODUCT else "")
                trial = BufferTrial(offer, slot, precision_named(dtype).weight_dtype, run.device, where, part)
                with naming_failures(trial.where):
                    found = trial.fault(self.compiles)
                require(not found, found)

    def test_weight_gradients_can_be_computed_later(self, dtype: str) -> None:
        """Products whose operands leave a compiled backward pass: the gradients are bitwise those of the pass."""
        from mplug.registry.precisions import precision_named
        from mplug_nn import MLPCore
        from mplug_testing.delayed_core_checks import SLOT, kind_of_core, later_core_fault
        from mplug_testing.delayed_gradient_checks import INPUTS, OUTPUTS, SLOTS, later_fault
        from mplug_testing.fused import kind_of
        from mplug_testing.kernel_buffer_checks import site_of

        run, offers = self._offered(dtype)
        products = [(offer, slot) for offer in offers for slot in SLOTS if slot in offer.suppliers]
        cores = [(offer, offer.suppliers[SLOT]) for offer in offers if isinstance(offer.suppliers.get(SLOT), MLPCore)]
        if not products and not cores:
            raise SkipTest(f"'{self.plugin}' supplies no whole product")
        for offer, core in cores:
            with naming_failures(f"{SLOT}, {dtype}"):
                kind, weights = kind_of_core(offer, run), precision_named(dtype).weight_dtype
                found = later_core_fault(core, kind, weights, run.device, self.compiles) if kind else ""
            require(not found, f"{SLOT}, {dtype}: {found}")
        for offer, slot in products:
            where = f"{slot}, {dtype}"
            kind = kind_of(slot, partial(_computes, offer, site_of(slot, OUTPUTS, INPUTS), run))
            with naming_failures(where):
                found = later_fault(offer, slot, precision_named(dtype).weight_dtype, run.device, self.compiles, kind)
            require(not found, f"{where}: {found}")

    def test_gathered_copies_of_its_weights_give_the_same_bits(self, dtype: str) -> None:
        """Copies that ranks make of their rows and gather give the results of the whole weight."""
        from mplug_nn import GatheredForm
        from mplug_testing.gathered_copy_checks import gathered_fault, gathered_forms

        run, offers = self._offered(dtype)
        found = [(offer, slot, form) for offer in offers for slot, form in gathered_forms(offer).items()]
        for _, slot, form in found:
            require(form != "", f"gathered_form of {slot} returns an empty reason")
        declared = [(offer, slot, form) for offer, slot, form in found if isinstance(form, GatheredForm)]
        if not declared:
            raise SkipTest(f"'{self.plugin}' has no copies of weights that ranks can gather")
        for offer, slot, form in declared:
            where = f"{slot}, {dtype}"
            with naming_failures(where):
                fault = gathered_fault(offer, slot, form, run.precision.activation_dtype, run.device)
            require(not fault, f"{where}: {fault}")

    def _offered(self, dtype: str | None = None) -> "tuple[Run, list[Offer]]":
        raise NotImplementedError


def _computes(offer: Offer, site: Site, run: "Run", kind: str) -> bool:
    """Whether an offer serves a site of a fused slot whose prologue is of a kind."""
    recipe = run.precision.recipe
    needs = frozenset({kind, *(() if recipe is None else (recipe.need,))})
    return answer_of(offer, replace(site, needs=needs), run) is True


def declared_by(offer: Offer, case: "Case") -> dict[str, Mapping[str, SlotBuffer]]:
    """The buffers that an offer declares for the sites of a case, by slot; none for slots that it does not fill."""
    found = {site.slot: offer.buffers(site) for site in sites_of(case) if site.slot in offer.suppliers}
    return {slot: declared for slot, declared in found.items() if declared}


def sites_of(case: "Case") -> Iterator[Site]:
    """The sites of a case."""
    for slot in case.slots:
        yield Site("blocks.*.part", slot, case.module, "blocks.0.part", case.needs, case.parameters)


def answer_of(offer: Offer, site: Site, run: "Run") -> bool | str:
    """The answer of `supports`, which must be True, False or a reason."""
    with naming_failures(f"supports for a site of {site.slot}"):
        answer: Any = offer.answer(site, run)
    sound = answer is True or answer is False or (isinstance(answer, str) and answer.strip())
    require(sound, f"supports returns {answer!r} for a site of {site.slot}; it must return True, False or a reason")
    return answer  # type: ignore[no-any-return]
