"""Whether a family's external names and config.json say the same as its plan."""

from collections.abc import Collection, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, get_args
from unittest import SkipTest

import torch
from pydantic import BaseModel
from torch import Tensor

from mplug.errors import UsageError
from mplug.layout.mesh import Mesh
from mplug.run.run import Run
from mplug_nn.public_config import FORMS, forms_of, written_config
from mplug_nn.public_form import FamilyField, FormField, PublicForm
from mplug_nn.public_rows import ReadField
from mplug_pretrained.external_form import conversion
from mplug_pretrained.transfer import Read, fill_ours, fill_theirs
from mplug_testing.suite import Fault, require

if TYPE_CHECKING:
    from mplug.model.model import Model

MOST = 1 << 25
"""Maximum number of elements of a published checkpoint that are compared one by one: 0.8 GB of memory."""


def require_published(run: Run, model: "Model") -> None:
    """Raise Fault unless every element of the model has one place in a published checkpoint, and the reverse.

    SkipTest if the family has no published form, or none for this config, or if the model has too many elements.
    """
    chosen = next(one for one in run.config.chosen if one.section == ("model",))
    plugin = chosen.plugin
    if model.plan.external is None:
        require(not forms_of(plugin), f"it has '{FORMS}', but its plan has no external names (Plan.external)")
        raise SkipTest("its plan has no external names, so it has no published form")
    if not forms_of(plugin):
        raise SkipTest(f"it has no '{FORMS}', so no config.json describes it")
    try:
        written_config(plugin, chosen.config)
    except ValueError as error:
        raise SkipTest(f"the model has no published form: {error}") from None
    model.place(Mesh.of([], 1), None)
    try:
        made = conversion(model)
    except UsageError as error:
        raise Fault(f"{error}") from None
    lost = sorted(made.absent & set(model.placements))
    require(not lost, f"its published form has no place for {lost}, so an export would lose it")
    number = sum(prod(made.shape(tensor)) for tensor in made.public)
    if number > MOST:
        raise SkipTest(f"its published checkpoint has {number:,} elements, too many to compare; use smaller settings")
    first, public = 0, dict[str, Tensor]()
    for tensor in made.public:
        shape = torch.Size(made.shape(tensor))
        public[tensor] = torch.arange(first, first + shape.numel(), dtype=torch.float64).view(shape)
        first += shape.numel()
    ours = dict[str, Tensor]()
    for name, links in made.links.items():
        ours[name] = torch.full(links[0].ours.shape, -1.0, dtype=torch.float64)
        fill_ours(links, (0,) * ours[name].dim(), ours[name], _reader(public))
        require(bool((ours[name] >= 0).all()), f"its external names leave elements of '{name}' out")
    for tensor, original in public.items():
        found = torch.full_like(original, -1.0)
        fill_theirs(made.public[tensor], found, _reader(ours))
        require(torch.equal(found, original), f"its external names give elements of '{tensor}' to several parameters")


def require_tables(plugin: Any) -> None:
    """Raise Fault unless the forms of a family are tables whose fields all have an effect. SkipTest without forms."""
    if not forms_of(plugin):
        raise SkipTest(f"it has no '{FORMS}', so it has no published form")
    for form in forms_of(plugin):
        decided = _require_settings(plugin.Config, form, form.architecture)
        twice = sorted({name for name in decided if decided.count(name) > 1})
        require(not twice, f"its form of {form.architecture} decides {twice} in two places")
        _require_used(form, form.architecture)


def _require_settings(config: type[BaseModel], form: PublicForm, what: str) -> list[str]:
    """Every setting of a form is one of the family's Config; returns those that the form decides."""
    decided = [*form.implied, *form.altering]
    for name, row in form.fields.items():
        if isinstance(row, ReadField):
            decided += row.settings
        elif isinstance(row, FamilyField):
            require(row.under in config.model_fields, f"its form of {what} sets '{row.under}', which its Config lacks")
            decided.append(row.under)
        elif isinstance(row, FormField) and not row.under:
            for one in row.forms:
                decided += _require_settings(config, one, f"{what} ({name})")
        elif isinstance(row, FormField):
            require(row.under in config.model_fields, f"its form of {what} sets '{row.under}', which its Config lacks")
            decided.append(row.under)
            for form_inside in row.forms:
                inside = _require_settings(_section(config, row.under), form_inside, f"{what} ({name})")
                twice = sorted({one for one in inside if inside.count(one) > 1})
                require(not twice, f"its form of {what} ({name}) decides {twice} in two places")
    decided += [name for name in form.training if name not in decided]
    unknown = sorted({name for name in decided if "." not in name} - set(config.model_fields))
    require(not unknown, f"its form of {what} sets {unknown}, which its Config lacks")
    aliased = sorted(set(form.aliases) & set(form.fields))
    require(not aliased, f"its form of {what} has {aliased} both as fields and as aliases")
    lost = sorted(set(form.aliases.values()) - set(form.fields))
    require(not lost, f"its form of {what} has aliases of {lost}, which it has no rows for")
    return decided


def _section(config: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of a field that is a section, or null."""
    annotation: Any = config.model_fields[name].annotation
    found = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel)]
    require(len(found) == 1, f"the field '{name}' of its Config is no section, and a mapping of its form sets it")
    return found[0]


class _Noted(dict[str, Any]):
    """Values that note which of them are read."""

    def __init__(self, values: dict[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)


def _require_used(form: PublicForm, what: str, seen_outside: Collection[str] = ()) -> None:
    """The form's function reads every field that decides no setting directly; so may that of the form around it."""
    rows = {name: row for name, row in form.fields.items() if isinstance(row, ReadField)}
    nested = {name: row.form for name, row in form.fields.items() if isinstance(row, FormField)}
    families = {name: row.read({}) for name, row in form.fields.items() if isinstance(row, FamilyField)}
    seen = {name for name, row in rows.items() if row.settings} | set(seen_outside)
    seen |= {form.longest} if form.longest is not None else set()
    inside: dict[str, set[str]] = {name: set() for name in nested}
    for values in _variants(rows):
        own = {name: _Noted(one.values(_required(one)), inside[name]) for name, one in nested.items()}
        try:
            form.settings(_Noted({**values, **families, **own}, seen))
        except ValueError:  # the values do not fit together
            continue
    unread = sorted(set(rows) - seen)
    require(not unread, f"its form of {what} declares {unread} as read, but nothing reads them")
    for name, row in form.fields.items():
        for one in row.forms if isinstance(row, FormField) else ():
            _require_used(one, f"{what} ({name})", inside[name])


def _required(form: PublicForm) -> dict[str, Any]:
    """The defaults of the fields that a mapping must have."""
    rows = {name: row for name, row in form.fields.items() if isinstance(row, ReadField)}
    return {name: row.default for name, row in rows.items() if row.required}


def _variants(rows: dict[str, ReadField]) -> Iterator[dict[str, Any]]:
    """The defaults of all fields, and these with one other value."""
    defaults = {name: row.default for name, row in rows.items()}
    yield defaults
    for name, row in rows.items():
        yield from ({**defaults, name: sample} for sample in row.values.samples)


def _reader(tensors: dict[str, Tensor]) -> Read:
    """Reads boxes of tensors in memory."""

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    return read
