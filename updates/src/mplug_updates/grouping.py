"""Which group of the config (`optimizer.groups`) each trained parameter belongs to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mplug.config.host_sections import ParameterGroup
from mplug.config.sources import source_of
from mplug.errors import UsageError
from mplug.layout.names import within
from mplug_adapting import refuse_unmatched

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.model.built import Built

FIELD = "optimizer.groups"


def grouped(model: "Built", config: "RunConfig") -> dict[str, int]:
    """The number of the group of each trained parameter that a group matches; the first group that matches applies.

    A tied parameter has the group of any of its names. Raises UsageError if a pattern matches nothing, if the names of
    a tied parameter have different groups, or if a group has no parameter. The answer is that of the whole model.
    """
    if not config.groups:
        return {}
    source = source_of(config.settings, tuple(FIELD.split(".")))
    for number, group in enumerate(config.groups):
        refuse_unmatched(model, group.match, f"{FIELD}.{number} ({source})")
    described = model.plan.match(model.parameters())
    found: dict[str, int] = {}
    for name, one in described.items():
        numbers = _numbers(config.groups, model.plan.names_of(name)) if one.trainable else {}
        if len(set(numbers.values())) > 1:
            (first, a), (second, b), *_ = numbers.items()
            raise UsageError(
                f"{FIELD} ({source}): '{first}' of group {a} and '{second}' of group {b} are one tied parameter; name "
                f"both in one group"
            )
        found |= dict.fromkeys([name] if numbers else [], next(iter(numbers.values()), 0))
    for number in sorted({*range(len(config.groups))} - {*found.values()}):
        reason = "is frozen or belongs to an earlier group" if number else "is frozen"
        raise UsageError(
            f"{FIELD}.{number} ({source}) has no effect: every parameter that it matches {reason}; remove the group, "
            f"or correct its patterns"
        )
    return found


def _numbers(groups: Sequence[ParameterGroup], names: Sequence[str]) -> Mapping[str, int]:
    """The first group that matches each of the names of a parameter; names without a group are left out."""
    found = {}
    for name in names:
        for number, group in enumerate(groups):
            if any(within(pattern).fullmatch(name) for pattern in group.match):
                found[name] = number
                break
    return found
