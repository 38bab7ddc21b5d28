"""Puts the selected suppliers and wraps into the slots of a model."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from mplug.config.sources import source_of
from mplug.contracts.micro_batch import DOCUMENTS
from mplug.errors import UsageError, listed, suggest
from mplug.layout.names import role_of
from mplug.layout.plan import TOKENS_AXIS
from mplug.model.model import Model
from mplug.model.products import only_in_other_stages, with_recipe
from mplug.model.slots.declaration import Slot, fusibles, slots_of
from mplug.model.slots.offers import UNIT, Filled, Site, Wrap
from mplug.model.slots.selection import Selection, select
from mplug.registry.entry_points import SLOTS, BrokenPlugin, Registry
from mplug.tensors.supplier import statements_of

if TYPE_CHECKING:
    from mplug.run.run import Run


def sites(module: nn.Module, entries: Container[str] = ()) -> Iterator[Site]:
    """Every slot of every module, in order. `entries` are the optional entries that micro batches have."""
    names = {id(part): name for name, part in module.named_modules()}
    found = [one for part in module.modules() for one in fusibles(part)]
    for name, part in module.named_modules():
        needs = getattr(part, "needs", _needs_nothing)
        for one in found:
            if one.reader is part:
                yield Site(role_of(name), one.slot, part, name, frozenset([one.kind]))
        for slot in slots_of(part):
            if slot.fuses:
                continue
            fused = frozenset(
                (names[id(one.reader)], one.slot) for one in found if one.inner is part and one.inner_slot == slot.name
            )
            stated = needs(slot.name, entries) | slot.needs(part, entries)
            yield Site(role_of(name), slot.name, part, name, stated, within=fused)


def _needs_nothing(slot: str, entries: Container[str]) -> frozenset[str]:
    return frozenset()


def select_offers(model: Model, run: "Run", offers: Iterable[Any]) -> Selection:
    """Select among offers for every slot of the model and the call of every unit; changes nothing."""
    names = [unit.name for unit in model.own_units]
    units = [Site(role_of(name), UNIT, model.module.get_submodule(name), name) for name in names]
    own, offers = list(with_recipe(sites_of(model, run.entries), model)), list(offers)
    known = known_slots(model)
    _refuse_unknown_kinds(run, known)
    refuse_unknown_slots(offers, known)
    if len(model.stages.units) == 1:
        _refuse_absent(own, model.declared, run)
    return select([*own, *units], offers, run.config.kernels, run, only_in_other_stages(model, own), known)


def known_slots(model: Model) -> dict[str, Slot]:
    """The slots that a plugin may name: those of the model, and those that installed distributions publish."""
    published = {entry.name: Slot(entry.name, entry.target) for entry in Registry.of_process().table(SLOTS)}
    return {**published, **model.declared}


def _refuse_unknown_kinds(run: "Run", known: Mapping[str, Slot]) -> None:
    """Raise UsageError if the config names a plugin for a kind of slot that nothing declares."""
    kinds = list(dict.fromkeys(slot.kind for slot in known.values()))
    for kind in run.config.kernels.kinds:
        if kind not in kinds:
            (owner,), source = run.hooks.implementers("build_model"), source_of(run.config.settings, ("kernels", kind))
            raise UsageError(
                f"kernels.{kind} ({source}): no block of {owner} has a slot of the kind '{kind}'"
                f"{suggest(kind, kinds)} (kinds: {listed(kinds)}); remove the setting"
            )


def refuse_unknown_slots(offers: Iterable[Any], known: Mapping[str, Slot]) -> None:
    """Raise BrokenPlugin if a plugin offers something for a slot that nothing declares."""
    for offer in offers:
        for slot in (offer.slot,) if isinstance(offer, Wrap) else offer.suppliers:
            if slot not in known and slot != UNIT:
                raise BrokenPlugin(
                    f"{offer.plugin} offers a {'wrap' if isinstance(offer, Wrap) else 'supplier'} for '{slot}', and no "
                    f"block of the model or of an installed package declares this slot{suggest(slot, known)}; correct "
                    f"the name, or install the package with the block"
                )


def _refuse_absent(own: Iterable[Site], declared: Mapping[str, Slot], run: "Run") -> None:
    """Raise UsageError if the config names a plugin for a fusion that no block of the model allows."""
    present = {site.kind for site in own}
    for slot in (slot for slot in declared.values() if slot.fuses and slot.kind not in present):
        if plugin := run.config.kernels.kinds.get(slot.kind):
            raise UsageError(
                f"kernels.{slot.kind}={plugin.rpartition('/')[2]}: the model has no {slot.fuses} whose result only one "
                f"linear layer reads; set kernels.{slot.kind}=null"
            )


def sites_of(model: Model, entries: Iterable[str] = ()) -> Iterator[Site]:
    """Every slot of every module of this rank, with the plan's entries of the module's parameters.

    The rows of a stream always come in segments, as documents of tokens do.
    """
    entry_of = {id(own): model.placements[name].parameter for name, own in model.parameters().items()}
    streams = {f"{unit.name}.": unit.sequence for unit in model.own_units if unit.sequence != TOKENS_AXIS}
    of_tokens, of_rows = sites(model.module, entries := frozenset(entries)), sites(model.module, entries | {DOCUMENTS})
    for site, in_segments in zip(of_tokens, of_rows, strict=True):
        own: Mapping[str, nn.Parameter | None] = site.module._parameters
        parameters = {name: entry_of[id(one)] for name, one in own.items() if one is not None}
        stream = next((axis for unit, axis in streams.items() if f"{site.name}.".startswith(unit)), "")
        if stream:
            yield replace(in_segments, parameters=parameters, sequence=stream)
        else:
            yield replace(site, parameters=parameters)


def fill_slots(model: Model, selection: Selection) -> None:
    """Install what is selected."""
    for site, content in contents_of(selection):
        setattr(site.module, site.declared.attribute, content)
    model.slots, model.unit_wraps = selection.filled, selection.units
    _refuse_unknown_collectives(selection.filled)


def contents_of(selection: Selection) -> Iterator[tuple[Site, Callable[..., Any]]]:
    """Each site with its content: the supplier, and the wraps around it from inner to outer."""
    built: dict[tuple[Any, ...], Callable[..., Any]] = {}
    for filled in selection.filled:
        supplier = filled.offer.suppliers[filled.site.slot] if filled.offer else filled.site.content
        key = (filled.site.role, supplier, *filled.wraps)
        if key not in built:  # one callable per role: one closure per site would recompile every block
            for wrap in filled.wraps:
                supplier = wrap.wrap(supplier)
            built[key] = supplier
        yield filled.site, built[key]


def _refuse_unknown_collectives(contents: Iterable[Filled]) -> None:
    """Raise UsageError if a supplier must do the work of a collective that states no boundary."""
    contents = list(contents)
    around = {(one.site.name, one.site.slot): one for one in contents}
    for filled in contents:
        for slot in filled.site.declared.collectives if filled.offer is not None else ():
            own = around[filled.site.name, slot]
            if own.site.content is own.site.declared.default or statements_of(own.site.content).is_replaceable:
                continue
            plugin = own.wraps[-1].plugin if own.wraps else own.supplier
            raise UsageError(
                f"{filled.supplier} replaces the collectives around '{filled.site.role}' ({filled.site.slot}), and "
                f"the part that {plugin} puts into {slot} cannot be replaced: the collective states no boundary; "
                f"set kernels.{filled.site.kind}=null, or use a layout without {plugin}"
            )


def wrap_units(model: Model) -> None:
    """Apply the selected wraps around the (possibly compiled) units of this rank, from inner to outer."""
    methods = {unit.name: unit.method for unit in model.own_units}
    for filled in model.unit_wraps:
        part, method = filled.site.module, methods[filled.site.name]
        for wrap in filled.wraps:
            setattr(part, method, wrap.wrap(getattr(part, method)))
