"""The config.json of a run's model, by the tables of its family (`public_forms`). Imports no torch."""

from collections.abc import Mapping
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
ROTARY, LONGEST = ("rope_theta", "rope_scaling", "rope_parameters"), "max_position_embeddings"
"""The fields of rotary positions, and the field with the length of the longest sequence."""


def settings_of(family: Any, path: Path) -> PublicSettings | None:
    """What a config.json describes for a family; None if it has no tables. ValueError for unsupported content.

    Files beside it say how pictures and videos are prepared for a family that sees (`PublicForm.preparation`): files of
    these names, or mappings in processor_config.json.
    """
    return _settings(family, read_json(path), path) if forms_of(family) else None


def _settings(family: Any, fields: Mapping[str, Any], path: Path) -> PublicSettings:
    """What the fields of a config.json describe, with the files beside the path."""
    form = form_of(forms_of(family), fields)
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


def extended_config(config: "RunConfig", original: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The original config.json of a run, with the run's rotary positions and at least its length of sequences.

    If the run's model differs in something else too, it is the config.json that the family writes (`config_of`).
    """
    chosen, written = _family_of(config), config_of(config)
    extended = _with_rotary(original, written, config.trainer.seq_length)
    found = _settings(chosen.plugin, extended, path)
    return written if differences(type(chosen.config), chosen.config, found) else extended


def _with_rotary(original: Mapping[str, Any], written: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The original fields with the written rotary positions, also in mappings that both have."""
    found = {
        name: _with_rotary(value, written[name], length)
        if isinstance(value, Mapping) and isinstance(written.get(name), Mapping) and name not in ROTARY
        else value
        for name, value in original.items()
    }
    rotary = {name: written[name] for name in ROTARY if name in written}
    longest = {LONGEST: max(found.get(LONGEST, 0), length)} if rotary else {}
    return {**found, **rotary, **longest}


def has_forms(config: "RunConfig") -> bool:
    """Whether a run's family has tables."""
    return bool(forms_of(_family_of(config).plugin))


def _family_of(config: "RunConfig") -> Any:
    return next(one for one in config.chosen if one.section == ("model",))
