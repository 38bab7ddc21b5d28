"""The config.json of a family's Config: what it says is read back and compared. No torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mplug.errors import listed, quoted
from mplug.registry.bind_section import bind
from mplug_nn.public_form import PublicForm
from mplug_pretrained.described import PublicSettings

FORMS = "public_forms"
"""An attribute of a family: the tables of the config.json's that it reads and writes (`PublicForm`)."""

PARTS = "public_parts"
"""An attribute of a family: the tables of the config.json's of folders with a part of its model (`Plan.parts`)."""


def forms_of(plugin: Any) -> tuple[PublicForm, ...]:
    """The forms of config.json that a family states; empty if it has none."""
    return tuple(getattr(plugin, FORMS, ()))


def part_forms_of(plugin: Any) -> Mapping[str, tuple[PublicForm, ...]]:
    """The forms of config.json of parts alone that a family states, by the names of the sections that they describe."""
    return dict(getattr(plugin, PARTS, {}))


def written_config(plugin: Any, config: Any) -> dict[str, Any]:
    """The config.json of a family's Config, in the first form that expresses it. Raises ValueError if none does.

    A form can express the model if its own table reads what it writes as the same model: every setting that changes
    what the trained model computes is then stated by the config.json, or is what the form implies.
    """
    problems: list[tuple[int, str]] = []
    for form in forms_of(plugin):
        try:
            fields = form.written(config)
            other = differences(type(config), config, form.read(fields))
        except ValueError as error:
            problems.append((1, f"a config.json of {form.architecture} cannot express it: {error}"))
            continue
        if not other:
            return fields
        problems.append((len(other), f"a config.json of {form.architecture} cannot express {listed(other)}"))
    fewest = min(number for number, _ in problems)
    raise ValueError("; ".join(reason for number, reason in problems if number == fewest))


def differences(model: type[BaseModel], own: Any, found: PublicSettings) -> list[str]:
    """The settings of a family's config that a config.json describes otherwise ('model.position=rotary').

    Choices that only training uses, such as dropout, may differ. Raises ValueError for settings that do not fit.
    """
    described, problems = bind(model, {**found.altering, **found.fixed, **_training(own, found)})
    if problems:
        raise ValueError(problems[0].sentence)
    if _equal(own, described):
        return []
    names = [name for name in model.model_fields if getattr(own, name) != getattr(described, name)]
    blamed = [name for name in names if _matters(own, described, name)] or names
    return [f"model.{name}={quoted(getattr(own, name))}" for name in blamed]


def _training(own: Any, found: PublicSettings) -> dict[str, Any]:
    return {name: getattr(own, name) for name in found.free if name not in found.fixed}


def _equal(one: Any, other: Any) -> bool:
    """Whether two configs describe the same model, also if they spell it differently."""
    alike = getattr(one, "computes_like", None)
    return bool(alike(other)) if callable(alike) else bool(one == other)


def _matters(own: Any, described: Any, name: str) -> bool:
    """Whether another value of one setting alone changes the model."""
    try:
        return not _equal(own.model_copy(update={name: getattr(described, name)}), own)
    except ValueError:  # the value does not fit the other settings
        return True
