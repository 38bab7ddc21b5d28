"""Puts the selected suppliers and wraps into the slots of a model."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug_nn import Attention, AttentionSpec, DotProductAttention, arguments
from mplug_nn.fusible import fusibles
from mplug_nn.linear import boundary_of
from mplug_nn.specification import DOCUMENTS
from torch import nn

from mplug.errors import UsageError
from mplug.layout.names import role_of
from mplug.model.model import Model
from mplug.model.offers import UNIT, Filled, Site
from mplug.model.recipe import is_base, with_recipe
from mplug.model.selection import Selection, select
from mplug.slot_kinds import KIND_OF, PRODUCTS, WHOLE_PRODUCTS

if TYPE_CHECKING:
    from mplug.run.run import Run


def sites(module: nn.Module, entries: Container[str] = ()) -> Iterator[Site]:
    """Every slot of every module, in order. `entries` are the optional entries that micro batches have."""
    names = {id(part): name for name, part in module.named_modules()}
    found = [one for part in module.modules() for one in fusibles(part)]
    for name, part in module.named_modules():
        needs = getattr(part, "needs", _needs_nothing)
        for one in found:
            if one.linear is part:
                yield Site(role_of(name), one.slot, part, name, frozenset([one.kind]))
        for slot in getattr(type(part), "SLOTS", ()):
            of_spec = _needs_of_spec(part, entries) if slot == "Attention.core" else frozenset()
            fused = frozenset(
                (names[id(one.linear)], one.slot) for one in found if one.inner is part and one.inner_slot == slot
            )
            yield Site(role_of(name), slot, part, name, needs(slot, entries) | of_spec, within=fused)


def _needs_of_spec(part: nn.Module, entries: Container[str]) -> frozenset[str]:
    """The needs of a module's attention specification; they apply in addition to its method `needs`."""
    spec = getattr(part, "spec", None)
    return replace(spec, documents=DOCUMENTS in entries).needs if isinstance(spec, AttentionSpec) else frozenset()


def _needs_nothing(slot: str, entries: Container[str]) -> frozenset[str]:
    return frozenset()


def select_offers(model: Model, run: "Run", offers: Iterable[Any]) -> Selection:
    """Select among offers for every slot of the model and the call of every unit; changes nothing."""
    names = [unit.name for unit in model.own_units]
    units = [Site(role_of(name), UNIT, model.module.get_submodule(name), name) for name in names]
    own = list(with_recipe(sites_of(model, run.entries), model))
    if len(model.stages.units) == 1:
        _refuse_absent(own, run)
    return select([*own, *units], offers, run.config.kernels, run, _only_in_other_stages(model, own))


def _refuse_absent(own: Iterable[Site], run: "Run") -> None:
    """Raise UsageError if the config names a plugin for a fusion that no block of the model allows."""
    present = {KIND_OF[site.slot] for site in own}
    prologues = {"norm_product": "norm", "activation_product": "activation"}
    for kind, prologue in prologues.items():
        if (plugin := run.config.kernels.kinds.get(kind)) and kind not in present:
            raise UsageError(
                f"kernels.{kind}={plugin.rpartition('/')[2]}: the model has no {prologue} whose result only one linear "
                f"layer reads; set kernels.{kind}=null"
            )


def _only_in_other_stages(model: Model, own: Iterable[Site]) -> set[str]:
    """The kinds of products that ignore the recipe in this stage because all their modules here are base modules."""
    if model.recipe is None or len(model.stages.units) == 1:
        return set()
    products = [site for site in own if site.slot in PRODUCTS]
    following = {KIND_OF[site.slot] for site in products if not is_base(site.name, model.base_modules)}
    return {KIND_OF[slot] for slot in PRODUCTS} - following


def sites_of(model: Model, entries: Container[str] = ()) -> Iterator[Site]:
    """Every slot of every module of this rank, with the plan's entries of the module's parameters."""
    entry_of = {id(own): model.placements[name].parameter for name, own in model.parameters().items()}
    for site in sites(model.module, entries):
        own: Mapping[str, nn.Parameter | None] = site.module._parameters
        yield replace(site, parameters={name: entry_of[id(one)] for name, one in own.items() if one is not None})


def fill_slots(model: Model, selection: Selection) -> None:
    """Install the selected suppliers, and apply the wraps around them from inner to outer."""
    built: dict[tuple[Any, ...], Callable[..., Any]] = {}
    for filled in selection.filled:
        attribute = filled.site.slot.rpartition(".")[2]
        default = getattr(filled.site.module, attribute)
        supplier = filled.offer.suppliers[filled.site.slot] if filled.offer else default
        key = (filled.site.role, supplier, *filled.wraps)
        if key not in built:  # one callable per role: one closure per site would recompile every block
            built[key] = _wrapped(filled, supplier)
        setattr(filled.site.module, attribute, built[key])
    model.slots, model.unit_wraps = selection.filled, selection.units
    _refuse_unknown_collectives(selection.filled)


def _refuse_unknown_collectives(contents: Iterable[Filled]) -> None:
    """Raise UsageError if the supplier of a whole product must do the work of a collective that states no boundary."""
    contents = list(contents)
    around = {(one.site.name, one.site.slot): one for one in contents}
    for filled in contents:
        if filled.site.slot not in WHOLE_PRODUCTS or filled.offer is None:
            continue
        for slot in ("Linear.gather", "Linear.scatter"):
            try:
                boundary_of(getattr(filled.site.module, slot.rpartition(".")[2]))
            except ValueError as error:
                own = around[filled.site.name, slot]
                plugin = own.wraps[-1].plugin if own.wraps else own.supplier
                raise UsageError(
                    f"{filled.supplier} replaces the collectives around '{filled.site.role}' ({filled.site.slot}), and "
                    f"the part that {plugin} puts into {slot} cannot be replaced: {error}; set "
                    f"kernels.{KIND_OF[filled.site.slot]}=null, or use a layout without {plugin}"
                ) from None


def _wrapped(filled: Filled, supplier: Callable[..., Any]) -> Callable[..., Any]:
    """A supplier with its wraps applied; attention suppliers and wraps with the signature of 0.1 get an adapter."""
    if filled.site.slot != "Attention.core":
        for wrap in filled.wraps:
            supplier = wrap.wrap(supplier)
        return supplier
    module, needs, plugin = filled.site.module, filled.site.needs, filled.supplier
    try:
        supplier = arguments.by_specification(supplier, needs)
        for wrap in filled.wraps:
            plugin = wrap.plugin
            supplier = arguments.wrapped(wrap.wrap, supplier, needs)
    except ValueError as error:
        raise UsageError(f"{plugin} cannot serve {filled.site.slot} of '{filled.site.role}': {error}") from None
    if not hasattr(module, "spec"):
        return arguments.by_arguments(supplier)
    return supplier if type(module) in (Attention, DotProductAttention) else arguments.by_either(supplier)


def wrap_units(model: Model) -> None:
    """Apply the selected wraps around the (possibly compiled) units of this rank, from inner to outer."""
    methods = {unit.name: unit.method for unit in model.own_units}
    for filled in model.unit_wraps:
        part, method = filled.site.module, methods[filled.site.name]
        for wrap in filled.wraps:
            setattr(part, method, wrap.wrap(getattr(part, method)))
