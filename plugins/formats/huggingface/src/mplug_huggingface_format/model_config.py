"""The config.json of a run's model, by the tables of its family (`public_forms`). Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError
from mplug_huggingface_format.config_file import read_json
from mplug_nn import differences, form_of, forms_of, part_forms_of, written_config
from mplug_pretrained import PublicSettings

if TYPE_CHECKING:
    from mplug import RunConfig


PROCESSOR = "processor_config.json"
"""The file in which newer releases of the library write how media are prepared; it prefers this file."""
INSIDE = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
"""Older file -> the field of `PROCESSOR` that has its fields."""


def settings_of(family: Any, path: Path) -> PublicSettings | None:
    """What a config.json describes for a family; None if it has no tables. ValueError for unsupported content.

    Files beside it say how pictures and videos are prepared for a family that sees (`PublicForm.preparation`): files of
    these names, or mappings in processor_config.json.
    """
    forms, fields = forms_of(family), read_json(path)
    if not forms:
        return None
    form = form_of(forms, fields)
    found = form.read(fields)
    newer = read_json(path.with_name(PROCESSOR)) if form.preparation and path.with_name(PROCESSOR).is_file() else {}
    for name in form.preparation:
        given = newer.get(INSIDE.get(name, ""))
        if isinstance(given, dict):
            found = form.read_preparation(found, name, given)
        elif (file := path.with_name(name)).is_file():
            found = form.read_preparation(found, name, read_json(file))
    return found


def part_settings_of(family: Any, part: str, path: Path) -> PublicSettings:
    """What a config.json describes of a part of a family's models. ValueError for unsupported content."""
    fields = read_json(path)
    return form_of(part_forms_of(family)[part], fields).read(fields)


def config_of(config: "RunConfig") -> dict[str, Any]:
    """The config.json of a run's model. Raises UsageError if its family has no published form for it."""
    chosen = _family_of(config)
    if not forms_of(chosen.plugin):
        raise UsageError(f"{chosen.label} ({chosen.entry.origin}) writes no published checkpoints")
    try:
        return written_config(chosen.plugin, chosen.config)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the model of {chosen.label} has no published form: {reason}") from None


def describes(config: "RunConfig", path: Path) -> bool:
    """Whether a config.json describes the model of a run. UsageError if its family cannot read it."""
    chosen = _family_of(config)
    try:
        found = settings_of(chosen.plugin, path)
    except ValueError as error:
        raise UsageError(
            f"{chosen.label} cannot read '{path}': {' '.join(str(error).split())}; use a checkpoint that it supports"
        ) from None
    return found is not None and not differences(type(chosen.config), chosen.config, found)


def has_forms(config: "RunConfig") -> bool:
    """Whether a run's family has tables."""
    return bool(forms_of(_family_of(config).plugin))


def _family_of(config: "RunConfig") -> Any:
    return next(one for one in config.chosen if one.section == ("model",))
