"""Which offer fills each site. Pure; imports no torch.

`select` makes one table: a row for each site, with the wraps around it and the answer of every supplier that is offered
for it. Each rule then is one function of rows.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mplug.errors import UsageError, listed
from mplug.model.slots.declaration import Slot
from mplug.model.slots.offers import PLAIN, UNIT, Filled, Offer, Site, Unmet, Wrap
from mplug.tensors.supplier import statements_of

if TYPE_CHECKING:
    from mplug.config.binding import Kernels
    from mplug.run.run import Run


@dataclass
class Selection:
    """The outcome of selecting among `offers`: the content of every site, the wraps around units, the unmet needs."""

    filled: list[Filled] = field(default_factory=list)
    units: list[Filled] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)
    offers: list[Offer | Wrap] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A site with all its needs, the wraps that support it, and every answer of a plugin that is asked about it.

    An answer is True, a reason against the site, or False if the offer is not meant for it.
    """

    site: Site
    wraps: tuple[Wrap, ...]
    of_wraps: tuple[tuple[Wrap, bool | str], ...]
    of_suppliers: tuple[tuple[Offer, bool | str], ...]


def select(
    sites: Iterable[Site],
    offers: Iterable[Offer | Wrap],
    kernels: "Kernels",
    run: "Run",
    elsewhere: Collection[str] = (),
    known: Mapping[str, Slot] | None = None,
) -> Selection:
    """Select a supplier and wraps for each site.

    An offer of a kernel plugin counts if the config names the plugin for every slot that the offer fills. A strategy's
    offers always count, and precede those of the default kernel. Raises UsageError, naming both plugins, if two
    suppliers claim one site or two plugins wrap one site at the same layer.

    A kernel that the config names for a kind of slot must fill at least one site. This does not hold for the kinds in
    `elsewhere`: their sites may be in other stages of the pipeline. `known` are all slots that offers may name; None:
    those of the sites.
    """
    sites, offers = list(sites), list(offers)
    if known is None:
        known = {site.slot: site.declared for site in sites}
    wraps = [wrap for wrap in offers if isinstance(wrap, Wrap)]
    suppliers = [one for one in offers if isinstance(one, Offer) and _counts(one, kernels, known)]
    table = [_row(site, wraps, suppliers, run) for site in sites]
    for row in table:
        _refuse_two_wraps_at_one_layer(row)
    units, slots = _divided(table)
    contents = [Filled(row.site, _supplier(row, kernels, run), row.wraps, _rivals(row, kernels)) for row in slots]
    contents = _without_idle_fallbacks(contents, kernels)
    unmet = [reason for row in units for reason in _reasons_of_wraps(row)]
    for row in slots:
        unmet += [*_reasons_of_wraps(row), *_reasons_of_suppliers(row, suppliers, kernels, known)]
    unmet = _unmet_where_called(unmet, contents)
    unmet = _without_consequences(unmet)
    unmet = _unmet_in_whole(unmet, suppliers, contents, elsewhere)
    unmet += [one for one in _idle(contents, unmet, kernels) if one.kind not in elsewhere]
    _refuse_uncalled(contents, kernels)
    return Selection(contents, [Filled(row.site, None, row.wraps) for row in units if row.wraps], unmet, offers)


def _counts(offer: Offer, kernels: "Kernels", known: Mapping[str, Slot]) -> bool:
    """Whether an offer counts: one of a kernel plugin only if the config names the plugin for all of its slots.

    Of rivals, only offers with a rate count.
    """
    kinds = {known[slot].kind for slot in offer.suppliers if slot in known}
    competes = offer.competes(kernels) and kinds.isdisjoint(kernels.kinds)
    is_named = all(kernels.chosen(kind) == offer.plugin for kind in kinds)
    return offer.plugin not in kernels.plugins or competes or is_named


def _row(site: Site, wraps: Iterable[Wrap], suppliers: Iterable[Offer], run: "Run") -> Row:
    """Ask all wraps and suppliers of the slot; what the wraps need becomes a need of the site."""
    of_wraps = tuple((wrap, wrap.answer(site, run)) for wrap in wraps if wrap.slot == site.slot)
    applied = tuple(sorted((wrap for wrap, answer in of_wraps if answer is True), key=lambda wrap: wrap.layer))
    if site.slot == UNIT:
        return Row(site, applied, of_wraps, ())
    site = replace(site, needs=site.needs.union(*(wrap.needs for wrap in applied)))
    answers = ((offer, offer.answer(site, run)) for offer in suppliers if site.slot in offer.suppliers)
    return Row(site, applied, of_wraps, tuple(answers))


def _divided(table: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(the rows of units, the rows of slots)."""
    rows = list(table)
    return [row for row in rows if row.site.slot == UNIT], [row for row in rows if row.site.slot != UNIT]


def _refuse_two_wraps_at_one_layer(row: Row) -> None:
    for inner, outer in pairwise(row.wraps):
        if inner.layer == outer.layer and inner.plugin != outer.plugin:
            raise UsageError(
                f"{inner.plugin} and {outer.plugin} both wrap {row.site.slot} of '{row.site.role}' at layer "
                f"{inner.layer}, so their order is undefined; use only one of them"
            )


def _rivals(row: Row, kernels: "Kernels") -> tuple[tuple[Offer, bool | str], ...]:
    is_open = row.site.kind not in kernels.kinds
    return tuple(pair for pair in row.of_suppliers if is_open and pair[0].competes(kernels))


def _supplier(row: Row, kernels: "Kernels", run: "Run") -> Offer | None:
    """The one supplier that fills a site, or None. Default kernels and fallbacks give way to other suppliers."""
    able, site = [offer for offer, answer in row.of_suppliers if answer is True], row.site
    if site.kind not in kernels.kinds:
        able = [offer for offer in able if offer.plugin not in kernels.defaults] or able
    able = [offer for offer in able if not offer.fallback] or able
    if all(offer.plugin in kernels.rivals for offer in able):
        if len(able) > 1 and run.config.trainer.graphs:
            able = [offer for offer in able if offer.captures is True] or able
        able = sorted(able, key=lambda offer: (-offer.rate, kernels.rivals.index(offer.plugin)))[:1]
    if len(able) > 1:
        raise UsageError(
            f"{listed(offer.plugin for offer in able)} both fill {site.slot} of '{site.role}'; "
            f"change kernels.{site.kind} or the layout so that only one of them remains"
        )
    return able[0] if able else None


def _without_idle_fallbacks(contents: list[Filled], kernels: "Kernels") -> list[Filled]:
    """The contents, without a fallback that the supplier of a wider slot would never call.

    The default kernel is a fallback for a norm or an activation together with a product: without it, the norm runs.
    """
    wider = Wider(contents)

    def is_idle(filled: Filled) -> bool:
        fuses = bool(filled.site.declared.fuses) and filled.supplier in kernels.defaults
        is_fallback = filled.offer is not None and (filled.offer.fallback or fuses)
        return is_fallback and any(wider.replacing(filled.site))

    return [replace(filled, offer=None) if is_idle(filled) else filled for filled in contents]


def _reasons_of_wraps(row: Row) -> list[Unmet]:
    return [Unmet(wrap.plugin, row.site, answer) for wrap, answer in row.of_wraps if isinstance(answer, str)]


def _reasons_of_suppliers(
    row: Row, suppliers: Iterable[Offer], kernels: "Kernels", known: Mapping[str, Slot]
) -> list[Unmet]:
    """Why no supplier serves a site, if none does and the site must not keep its default in plain torch."""
    site = row.site
    lacking = site.lacking(offered_in_plain_torch(site))
    is_open = bool(kernels.rivals) and site.kind not in kernels.kinds and not lacking
    if any(answer is True for _, answer in row.of_suppliers):
        return []
    heard = [pair for pair in row.of_suppliers if not (is_open and pair[0].plugin in kernels.rivals)]
    refusals = [(offer, answer) for offer, answer in heard if not offer.fallback]
    said = [Unmet(offer.plugin, site, answer) for offer, answer in refusals if isinstance(answer, str)]
    unmet = list(dict.fromkeys(said))  # offers of one plugin may lack the same need
    named = kernels.kinds.get(site.kind)
    offered = {slot for offer in suppliers if offer.plugin == named for slot in offer.suppliers}
    if named and not any(slot in known and known[slot].kind == site.kind for slot in offered):
        unmet.append(Unmet(named, site, f"it offers no supplier for slots of the kind '{site.kind}' alone"))
    if not unmet and lacking:
        unmet.append(Unmet(PLAIN, site, lacking))
    return unmet


def offered_in_plain_torch(site: Site) -> frozenset[str]:
    """The needs of a site that its default in plain torch serves; none if the site holds something else."""
    slot = site.declared
    if site.content is not slot.default:
        return frozenset()
    return site.needs if slot.composes else frozenset(slot.serves)


def _unmet_where_called(unmet: Iterable[Unmet], contents: Iterable[Filled]) -> list[Unmet]:
    """The unmet needs of slots that the contents of wider slots do call."""
    wider = Wider(contents)
    return [one for one in unmet if not any(wider.replacing(one.site))]


def _without_consequences(unmet: list[Unmet]) -> list[Unmet]:
    """Leave out what plain torch lacks only because a plugin refuses the wider slot of the same module."""

    def follows(one: Unmet) -> bool:
        return one.plugin == PLAIN and any(
            other.plugin != PLAIN
            and other.site.name == one.site.name
            and one.site.slot in other.site.declared.calls.get("", ())
            for other in unmet
        )

    return [one for one in unmet if not follows(one)]


def _unmet_in_whole(
    unmet: Iterable[Unmet], suppliers: Iterable[Offer], contents: Iterable[Filled], elsewhere: Collection[str]
) -> list[Unmet]:
    """Leave out the refusals of a partial offer that serves another site of the slot, maybe in another stage."""
    partial = {(offer.plugin, slot) for offer in suppliers if offer.partial for slot in offer.suppliers}
    working = {(filled.supplier, filled.site.slot) for filled in contents if filled.offer}

    def serves_another(one: Unmet) -> bool:
        what = (one.plugin, one.site.slot)
        return what in partial and (what in working or one.kind in elsewhere)

    return [one for one in unmet if not serves_another(one)]


def _idle(contents: Iterable[Filled], unmet: Iterable[Unmet], kernels: "Kernels") -> list[Unmet]:
    """The plugins that the config names for a kind of slot, and that fill none of the model's sites of this kind."""
    working = {(filled.site.kind, filled.supplier) for filled in contents}
    reported = {(one.kind, one.plugin) for one in unmet}
    first: dict[str, Site] = {}
    for filled in contents:
        first.setdefault(filled.site.kind, filled.site)
    return [
        Unmet(plugin, first[kind], f"it fills none of the slots of the kind '{kind}' that this model has")
        for kind, plugin in kernels.kinds.items()
        if plugin and kind in first and (kind, plugin) not in working | reported
    ]


def _refuse_uncalled(contents: list[Filled], kernels: "Kernels") -> None:
    """Refuse a supplier or wrap that would never run, because another supplier replaces the wider slot around it.

    Suppliers of the default kernel are exempt: they are fallbacks.
    """
    wider = Wider(contents)
    for filled in contents:
        required = [wrap.plugin for wrap in filled.wraps if not wrap.dispensable]
        if filled.offer and filled.supplier not in kernels.defaults:
            required.append(filled.supplier)
        for fused, slot in wider.replacing(filled.site):
            uncalled = [plugin for plugin in required if plugin != fused]
            if uncalled:
                raise UsageError(
                    f"{fused} replaces {slot.name} of '{filled.site.role}' as a whole, so the part that {uncalled[0]} "
                    f"puts into {filled.site.slot} would never run; set kernels.{slot.kind}=null, or use a layout "
                    f"without {uncalled[0]}"
                )


class Wider:
    """The wider slots whose content does not call the narrower ones."""

    def __init__(self, contents: Iterable[Filled]) -> None:
        self._at: dict[str, list[Filled]] = {}
        for filled in contents:
            if filled.site.declared.calls or filled.offer:
                self._at.setdefault(filled.site.name, []).append(filled)

    def replacing(self, site: Site) -> Iterator[tuple[str, Slot]]:
        """(plugin, slot) of each wider slot whose content never calls the slot of a site."""
        for name, part in _modules_around(site.name):
            for filled in self._at.get(name, ()):
                slot = filled.site.declared
                if site.slot in slot.calls.get(part, ()) and (plugin := _replaces(filled, site.slot)):
                    yield plugin, slot
        for name, wide in sorted(site.within):
            for filled in self._at.get(name, ()):
                if filled.site.slot == wide and filled.offer:
                    yield filled.supplier, filled.site.declared


def _modules_around(name: str) -> Iterator[tuple[str, str]]:
    """(module, the rest of the name) for the module itself and every module that contains it: ('mlp', 'up')."""
    yield name, ""
    outer, part = name, ""
    while outer:
        outer, _, child = outer.rpartition(".")
        part = f"{child}.{part}" if part else child
        yield outer, part


def _replaces(filled: Filled, narrower: str) -> str:
    """The plugin whose content of a wider slot does not call a narrower slot; empty if the content calls it."""
    if filled.offer:
        return "" if narrower in statements_of(filled.offer.suppliers[filled.site.slot]).calls else filled.supplier
    return filled.wraps[0].plugin if filled.wraps and narrower in filled.site.declared.unless_wrapped else ""
