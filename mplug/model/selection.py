"""Which offer fills each site: collected, selected by the config, conflicts refused. Pure; imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mplug.errors import UsageError, listed
from mplug.model.offers import PLAIN, UNIT, Filled, Offer, Site, Unmet, Wrap
from mplug.slot_kinds import CALLED_BY, KIND_OF

if TYPE_CHECKING:
    from mplug.config.binding import Kernels
    from mplug.run.run import Run


@dataclass
class Selection:
    """The outcome of selecting: the content of every site, the wraps around units, and the unmet needs."""

    filled: list[Filled] = field(default_factory=list)
    units: list[Filled] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)


def select(sites: Iterable[Site], offers: Iterable[Offer | Wrap], kernels: "Kernels", run: "Run") -> Selection:
    """Select a supplier and wraps for each site.

    An offer of a kernel plugin counts if the config names the plugin for every slot that the offer fills. A strategy's
    offers always count, and precede those of the default kernel. Raises UsageError, naming both plugins, if two
    suppliers claim one site or two plugins wrap one site at the same layer.
    """
    offers = list(offers)
    suppliers = [offer for offer in offers if isinstance(offer, Offer) and _named(offer, kernels)]
    wraps = [wrap for wrap in offers if isinstance(wrap, Wrap)]
    selection = Selection()
    for site in sites:
        if site.slot == UNIT:
            around, unmet = _wraps_of(site, wraps, run)
            selection.units += [Filled(site, None, around)] if around else []
            selection.unmet += unmet
            continue
        around, unmet = _wraps_of(site, wraps, run)
        site = replace(site, needs=site.needs.union(*(wrap.needs for wrap in around)))
        supplier, reasons = _supplier_of(site, suppliers, kernels, run)
        selection.filled.append(Filled(site, supplier, around))
        selection.unmet += [*unmet, *reasons]
    selection.unmet += _idle(selection, kernels)
    _refuse_uncalled(selection.filled, kernels)
    return selection


def _idle(selection: Selection, kernels: "Kernels") -> list[Unmet]:
    """Plugins that the config names for a kind, and that fill no site of this kind although the model has some."""
    working = {(KIND_OF[one.site.slot], one.supplier) for one in selection.filled}
    told = {(one.kind, one.plugin) for one in selection.unmet}
    first = {KIND_OF[one.site.slot]: one.site for one in reversed(selection.filled)}
    return [
        Unmet(named, first[kind], f"of the slots of the kind '{kind}' that this model has, it fills none")
        for kind, named in kernels.kinds.items()
        if named and kind in first and (kind, named) not in working | told
    ]


def _refuse_uncalled(filled: list[Filled], kernels: "Kernels") -> None:
    """Refuse a supplier or wrap that would never run, because another supplier replaces the wider slot around it.

    Suppliers of the default kernel are exempt: they are fallbacks.
    """
    suppliers = {(one.site.name, one.site.slot): one.supplier for one in filled if one.offer}
    for one in filled:
        uncalled = [wrap.plugin for wrap in one.wraps if not wrap.dispensable]
        if one.offer and one.supplier != kernels.default:
            uncalled.append(one.supplier)
        for fused, wider in _around(one.site, suppliers):
            lost = [plugin for plugin in uncalled if plugin != fused]
            if lost:
                raise UsageError(
                    f"{fused} fills {wider} of '{one.site.role}', and would not call what {lost[0]} puts into "
                    f"{one.site.slot}; set kernels.{KIND_OF[wider]}=null, or use a layout without {lost[0]}"
                )


def _around(site: Site, suppliers: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    """(supplier, slot) of the wider slots around a site that have a supplier."""
    parent, _, child = site.name.rpartition(".")
    for name, part in ((site.name, ""), (parent, child)):
        for wider in CALLED_BY.get((part, site.slot), ()):
            if (name, wider) in suppliers:
                yield suppliers[name, wider], wider


def _named(offer: Offer, kernels: "Kernels") -> bool:
    is_kernel = offer.plugin.startswith("kernels/")
    return not is_kernel or all(kernels.chosen(KIND_OF[slot]) == offer.plugin for slot in offer.suppliers)


def _wraps_of(site: Site, wraps: list[Wrap], run: "Run") -> tuple[tuple[Wrap, ...], list[Unmet]]:
    answers = [(wrap, wrap.answer(site, run)) for wrap in wraps if wrap.slot == site.slot]
    around = sorted((wrap for wrap, answer in answers if answer is True), key=lambda wrap: wrap.layer)
    for inner, outer in pairwise(around):
        if inner.layer == outer.layer and inner.plugin != outer.plugin:
            raise UsageError(
                f"{inner.plugin} and {outer.plugin} both wrap {site.slot} of '{site.role}' at layer {inner.layer}, and "
                f"nothing says which is outside; name one of them"
            )
    return tuple(around), [Unmet(wrap.plugin, site, answer) for wrap, answer in answers if isinstance(answer, str)]


def _supplier_of(
    site: Site, suppliers: list[Offer], kernels: "Kernels", run: "Run"
) -> tuple[Offer | None, list[Unmet]]:
    answers = [(offer, offer.answer(site, run)) for offer in suppliers if site.slot in offer.suppliers]
    able, kind = [offer for offer, answer in answers if answer is True], KIND_OF[site.slot]
    if kind not in kernels.kinds:  # the default kernel is the fallback for slots without another supplier
        able = [offer for offer in able if offer.plugin != kernels.default] or able
    if len(able) > 1:
        raise UsageError(
            f"{listed(offer.plugin for offer in able)} both claim {site.slot} of '{site.role}'; "
            f"change kernels.{kind} or the layout so that one of them remains"
        )
    if able:
        return able[0], []
    named = kernels.chosen(kind)
    unmet = [Unmet(offer.plugin, site, answer) for offer, answer in answers if isinstance(answer, str)]
    if named and kind in kernels.kinds and not _supplies(kind, [offer for offer in suppliers if offer.plugin == named]):
        unmet.append(Unmet(named, site, f"it supplies no slot of the kind '{kind}' alone"))
    if not unmet and (lacking := site.lacking(_offered_in_plain_torch(site))):
        unmet.append(Unmet(PLAIN, site, lacking))
    return None, unmet


def _offered_in_plain_torch(site: Site) -> frozenset[str]:
    default = getattr(site.module, site.slot.rpartition(".")[2], None)
    return getattr(default, "offers", frozenset())


def _supplies(kind: str, offers: list[Offer]) -> bool:
    return any(KIND_OF[slot] == kind for offer in offers for slot in offer.suppliers)
