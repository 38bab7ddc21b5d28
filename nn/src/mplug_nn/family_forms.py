"""The config.json of a family inside of another one, by the forms of whichever installed family claims it. No torch."""

from collections.abc import Mapping
from typing import Any

from mplug.config.family import Family
from mplug.errors import UsageError, brief, listed
from mplug.registry.bind_section import bind
from mplug.registry.entry_points import ARCHITECTURES, Registry
from mplug_nn.public_config import forms_of, written_config
from mplug_nn.public_form import FamilyField, FoundFamily, form_of


def family_field(under: str, default: str) -> FamilyField:
    """A field whose value is the config.json of the family in the setting `under`.

    `model_type` decides the family: an installed one claims it in the entry-point group 'mplug.architectures', and its
    own forms read and write the mapping. `default` is the `model_type` of a mapping that states none.
    """
    return FamilyField(under, lambda given: read_family({"model_type": default, **given}), written_family)


def read_family(given: Mapping[str, Any]) -> FoundFamily:
    """The family that claims the `model_type` of a config.json, and what it reads. Raises ValueError."""
    registry, kind = Registry.of_process(), given["model_type"]
    claims = [one for one in registry.table(ARCHITECTURES) if one.name == kind]
    if len(claims) != 1:
        readable = listed(sorted({one.name for one in registry.table(ARCHITECTURES)}))
        found = listed(one.origin for one in claims) or "none"
        raise ValueError(
            f"its 'model_type' {brief(repr(kind))} must be read by one installed family, but is by {found} (they read "
            f"{readable})"
        )
    try:
        entry = registry.find("models", f"{claims[0].distribution}/{claims[0].target}")
        plugin = registry.load(entry)
    except UsageError as error:
        raise ValueError(str(error)) from None
    if not forms_of(plugin):
        raise ValueError(f"{entry.label} ({entry.origin}) reads no config.json")
    settings = form_of(forms_of(plugin), given).read(given)
    config, problems = bind(plugin.Config, {**settings.choices, **settings.fixed}, registry)
    if problems:
        raise ValueError(problems[0].sentence)
    is_alone = entry.name in registry.names("models")
    return FoundFamily(entry.name if is_alone else f"{entry.distribution}/{entry.name}", config, settings)


def written_family(family: Family) -> dict[str, Any]:
    """The config.json of a family inside of another one. Raises ValueError if it has no published form."""
    if not forms_of(family.plugin):
        raise ValueError(f"{family.label} writes no config.json")
    return written_config(family.plugin, family.config)
