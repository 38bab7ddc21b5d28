"""Which offer fills each site: collected, selected by the config, conflicts refused. Pure; imports no torch."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mplug.errors import UsageError, listed
from mplug.model.offers import PLAIN, UNIT, Filled, Offer, Site, Unmet, Wrap
from mplug.slot_kinds import CALLED_BY, FUSED_PRODUCTS, KIND_OF, WIDE_PRODUCTS
from mplug.tensors.supplier import Supplier, statements_of

if TYPE_CHECKING:
    from mplug.config.binding import Kernels
    from mplug.run.run import Run


@dataclass
class Selection:
    """The outcome of selecting: the content of every site, the wraps around units, and the unmet needs."""

    filled: list[Filled] = field(default_factory=list)
    units: list[Filled] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)


def select(
    sites: Iterable[Site],
    offers: Iterable[Offer | Wrap],
    kernels: "Kernels",
    run: "Run",
    elsewhere: Collection[str] = (),
) -> Selection:
    """Select a supplier and wraps for each site.

    An offer of a kernel plugin counts if the config names the plugin for every slot that the offer fills. A strategy's
    offers always count, and precede those of the default kernel. Raises UsageError, naming both plugins, if two
    suppliers claim one site or two plugins wrap one site at the same layer.

    A kernel that the config names for a kind of slot must fill at least one site. This does not hold for the kinds in
    `elsewhere`: their sites may be in other stages of the pipeline.
    """
    offers = list(offers)
    suppliers = [offer for offer in offers if isinstance(offer, Offer) and _is_chosen(offer, kernels)]
    wraps = [wrap for wrap in offers if isinstance(wrap, Wrap)]
    selection = Selection()
    for site in sites:
        applied, unmet = _wraps_of(site, wraps, run)
        if site.slot == UNIT:
            selection.units += [Filled(site, None, applied)] if applied else []
            selection.unmet += unmet
            continue
        site = replace(site, needs=site.needs.union(*(wrap.needs for wrap in applied)))
        supplier, reasons = _supplier_of(site, suppliers, kernels, run)
        selection.filled.append(Filled(site, supplier, applied))
        selection.unmet += [*unmet, *reasons]
    wider = Wider(selection.filled)
    selection.filled = [_without_idle_fallback(filled, wider, kernels) for filled in selection.filled]
    wider = Wider(selection.filled)
    selection.unmet = [unmet for unmet in selection.unmet if not any(wider.replacing(unmet.site))]
    selection.unmet = [unmet for unmet in selection.unmet if not _follows(unmet, selection.unmet)]
    selection.unmet += [one for one in _idle(selection, kernels) if one.kind not in elsewhere]
    _refuse_uncalled(selection.filled, wider, kernels)
    return selection


def _idle(selection: Selection, kernels: "Kernels") -> list[Unmet]:
    """The plugins that the config names for a kind of slot, and that fill none of the model's sites of this kind."""
    working = {(KIND_OF[filled.site.slot], filled.supplier) for filled in selection.filled}
    reported = {(unmet.kind, unmet.plugin) for unmet in selection.unmet}
    first = {KIND_OF[filled.site.slot]: filled.site for filled in reversed(selection.filled)}
    return [
        Unmet(plugin, first[kind], f"it fills none of the slots of the kind '{kind}' that this model has")
        for kind, plugin in kernels.kinds.items()
        if plugin and kind in first and (kind, plugin) not in working | reported
    ]


def _follows(unmet: Unmet, others: Iterable[Unmet]) -> bool:
    """Whether plain torch lacks a need only because a plugin refuses the wider slot of the same module."""
    wider = CALLED_BY.get(("", unmet.site.slot), ())
    return unmet.plugin == PLAIN and any(
        one.site.name == unmet.site.name and one.site.slot in wider and one.plugin != PLAIN for one in others
    )


class Wider:
    """The wider slots whose content does not call the narrower ones."""

    def __init__(self, contents: Iterable[Filled]) -> None:
        self._contents = {(filled.site.name, filled.site.slot): filled for filled in contents}

    def replacing(self, site: Site) -> Iterator[tuple[str, str]]:
        """(plugin, slot) of each wider slot whose content never calls the slot of a site."""
        parent, _, child = site.name.rpartition(".")
        for name, part in ((site.name, ""), (parent, child)):
            for slot in CALLED_BY.get((part, site.slot), ()):
                filled = self._contents.get((name, slot))
                plugin = filled and _replaces(filled, site.slot)
                if plugin:
                    yield plugin, slot
        for name, slot in sorted(site.within):
            filled = self._contents.get((name, slot))
            if filled and filled.offer:
                yield filled.supplier, slot


def _without_idle_fallback(filled: Filled, wider: Wider, kernels: "Kernels") -> Filled:
    """The content of a site, without a fallback that the supplier of a wider slot would never call.

    The default kernel is a fallback for a norm or an activation together with a product: without it, the norm runs.
    """
    if filled.offer is None:
        return filled
    fuses = filled.site.slot in FUSED_PRODUCTS and filled.supplier == kernels.default
    idle = (filled.offer.fallback or fuses) and any(wider.replacing(filled.site))
    return replace(filled, offer=None) if idle else filled


def _replaces(filled: Filled, narrower: str) -> str:
    """The plugin whose content of a wider slot does not call a narrower slot; empty if the content calls it.

    Wraps around the default of `MLP.core` call the narrowest slots.
    """
    if filled.offer:
        return "" if narrower in statements_of(filled.offer.suppliers[filled.site.slot]).calls else filled.supplier
    return filled.wraps[0].plugin if filled.wraps and narrower in WIDE_PRODUCTS else ""


def _refuse_uncalled(contents: list[Filled], wider: Wider, kernels: "Kernels") -> None:
    """Refuse a supplier or wrap that would never run, because another supplier replaces the wider slot around it.

    Suppliers of the default kernel are exempt: they are fallbacks.
    """
    for filled in contents:
        required = [wrap.plugin for wrap in filled.wraps if not wrap.dispensable]
        if filled.offer and filled.supplier != kernels.default:
            required.append(filled.supplier)
        for fused, slot in wider.replacing(filled.site):
            uncalled = [plugin for plugin in required if plugin != fused]
            if uncalled:
                raise UsageError(
                    f"{fused} replaces {slot} of '{filled.site.role}' as a whole, so the part that {uncalled[0]} puts "
                    f"into {filled.site.slot} would never run; set kernels.{KIND_OF[slot]}=null, or use a layout "
                    f"without {uncalled[0]}"
                )


def _is_chosen(offer: Offer, kernels: "Kernels") -> bool:
    is_kernel = offer.plugin.startswith("kernels/")
    return not is_kernel or all(kernels.chosen(KIND_OF[slot]) == offer.plugin for slot in offer.suppliers)


def _wraps_of(site: Site, wraps: list[Wrap], run: "Run") -> tuple[tuple[Wrap, ...], list[Unmet]]:
    answers = [(wrap, wrap.answer(site, run)) for wrap in wraps if wrap.slot == site.slot]
    applied = sorted((wrap for wrap, answer in answers if answer is True), key=lambda wrap: wrap.layer)
    for inner, outer in pairwise(applied):
        if inner.layer == outer.layer and inner.plugin != outer.plugin:
            raise UsageError(
                f"{inner.plugin} and {outer.plugin} both wrap {site.slot} of '{site.role}' at layer {inner.layer}, so "
                f"their order is undefined; use only one of them"
            )
    return tuple(applied), [Unmet(wrap.plugin, site, answer) for wrap, answer in answers if isinstance(answer, str)]


def _supplier_of(
    site: Site, suppliers: list[Offer], kernels: "Kernels", run: "Run"
) -> tuple[Offer | None, list[Unmet]]:
    answers = [(offer, offer.answer(site, run)) for offer in suppliers if site.slot in offer.suppliers]
    able, kind = [offer for offer, answer in answers if answer is True], KIND_OF[site.slot]
    if kind not in kernels.kinds:  # the default kernel is the fallback for slots without another supplier
        able = [offer for offer in able if offer.plugin != kernels.default] or able
    able = [offer for offer in able if not offer.fallback] or able
    if len(able) > 1:
        raise UsageError(
            f"{listed(offer.plugin for offer in able)} both fill {site.slot} of '{site.role}'; "
            f"change kernels.{kind} or the layout so that only one of them remains"
        )
    if able:
        return able[0], []
    chosen = kernels.chosen(kind)
    required = [(offer, answer) for offer, answer in answers if not offer.fallback]
    unmet = [Unmet(offer.plugin, site, answer) for offer, answer in required if isinstance(answer, str)]
    of_chosen = [offer for offer in suppliers if offer.plugin == chosen]
    if chosen and kind in kernels.kinds and not _supplies(kind, of_chosen):
        unmet.append(Unmet(chosen, site, f"it offers no supplier for slots of the kind '{kind}' alone"))
    if not unmet and (lacking := site.lacking(offered_in_plain_torch(site))):
        unmet.append(Unmet(PLAIN, site, lacking))
    return None, unmet


def offered_in_plain_torch(site: Site) -> frozenset[str]:
    """The needs of a site that its default in plain torch serves."""
    default = getattr(site.module, site.slot.rpartition(".")[2], None)
    default = default.function if isinstance(default, Supplier) else default
    if getattr(default, "only_composes", False):
        return site.needs
    return getattr(default, "offers", frozenset())


def _supplies(kind: str, offers: list[Offer]) -> bool:
    return any(KIND_OF[slot] == kind for offer in offers for slot in offer.suppliers)
