"""Which modules of a model compute their matrix products by the recipe of the run's precision.

Products of the base modules compute in the precision's own formats. At every other product, the recipe is a need of the
site: only a supplier that offers it fills the slot.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.errors import UsageError, listed, suggest
from mplug.layout.names import role_of, within
from mplug.layout.plan import Plan
from mplug.model.slots.declaration import slots_of
from mplug.model.slots.offers import Site

if TYPE_CHECKING:
    from mplug.model.built import Built
    from mplug.model.rank_part import RankPart
    from mplug.run.run import Run

FIELD = "trainer.base_modules"


def default_base_modules(plan: Plan) -> tuple[str, ...]:
    """The patterns of a plan: the first and last unit of every row of numbered units, the other units, and its own."""
    rows: dict[str, list[str]] = {}
    for unit in plan.units:
        rows.setdefault(role_of(unit.name), []).append(unit.name)
    ends = (name for names in rows.values() for name in (names[0], names[-1]))
    return (*dict.fromkeys(ends), *plan.base_modules)


def choose_base_modules(run: "Run", model: "Built") -> tuple[str, ...]:
    """The patterns of the base modules of a whole model; empty if the precision has no recipe.

    Raises UsageError if a pattern matches no module, or if the recipe then applies to no product.
    """
    precision, word = run.precision, run.config.trainer.precision
    if precision.recipe is None:
        return ()
    own, source = run.config.trainer.base_modules, source_of(run.config.settings, tuple(FIELD.split(".")))
    modules = [name for name, _ in model.module.named_modules() if name]
    where, patterns = "the plan of the model", default_base_modules(model.plan)
    if own is not None:
        where, patterns = f"{FIELD} ({source})", own
    elif precision.base_modules is not None:
        where, patterns = f"the precision '{word}'", precision.base_modules
    for pattern in patterns:
        if not any(within(pattern).fullmatch(name) for name in modules):
            raise UsageError(
                f"{where}: the pattern '{pattern}' of base modules matches no module of the model"
                f"{suggest(pattern, modules)}; 'mplug explain' lists the modules"
            )
    products = [name for name, part in model.module.named_modules() if any(slot.multiplies for slot in slots_of(part))]
    if not any(not is_base(name, patterns) for name in products):
        reason = f"all of its {len(products)} products are in base modules ({listed(patterns)})"
        raise UsageError(
            f"trainer.precision={word} would compute nothing by its recipe '{precision.recipe.name}' in this model: "
            f"{reason if products else 'it has no products in slots'}; set {FIELD} to fewer modules, or name another "
            f"precision"
        )
    return patterns


def is_base(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module is a base module, or lies in one."""
    return any(within(pattern).fullmatch(name) for pattern in patterns)


def with_recipe(sites: Iterable[Site], model: "Built") -> Iterator[Site]:
    """The sites; a product outside of the base modules also needs the model's recipe."""
    recipe = model.recipe
    for site in sites:
        by_recipe = recipe is not None and site.declared.multiplies and not is_base(site.name, model.base_modules)
        yield replace(site, needs=site.needs | {recipe.need}) if recipe is not None and by_recipe else site


def only_in_other_stages(model: "RankPart", own: Iterable[Site]) -> set[str]:
    """The kinds of products that ignore the recipe in this stage because all their modules here are base modules."""
    if len(model.stages.units) == 1:
        return set()
    products = [site for site in own if site.declared.multiplies]
    following = {site.kind for site in products if not is_base(site.name, model.base_modules)}
    return {slot.kind for slot in model.declared.values() if slot.multiplies} - following
