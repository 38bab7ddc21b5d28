"""Which parameters a new run loads from `checkpoint.pretrained`: its patterns `only` and `except`. Imports no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mplug.config.host_sections import Pretrained
from mplug.errors import UsageError, suggest
from mplug.layout.names import within
from mplug.layout.plan import Plan

FIELD = "checkpoint.pretrained"
REMEDY = f"name them in {FIELD}.except, or use a checkpoint of this model"
"""What to do if a folder does not fit the model."""


@dataclass(frozen=True)
class Wanted:
    """The parameters and states to load, by our names, and the patterns of what the user excludes."""

    names: frozenset[str]
    excluded: tuple[re.Pattern[str], ...] = ()

    def allows(self, name: str) -> bool:
        """Whether the checkpoint may have a tensor that the model does not use."""
        return any(pattern.fullmatch(name) for pattern in self.excluded)


def wanted_of(section: Pretrained | None, plan: Plan, names: Iterable[str], present: Iterable[str]) -> Wanted:
    """What to load of the model's parameters and states `names`, by the section of the config.

    `present` are the names of the checkpoint's tensors, which patterns of `except` may match too. Raises UsageError for
    a pattern that matches nothing.
    """
    aliases = {name: plan.names_of(name) for name in names}
    known = [alias for group in aliases.values() for alias in group]
    if section is None:
        return Wanted(frozenset(aliases))
    present = list(present)
    for field, patterns, candidates in (
        ("only", section.only or (), known),
        ("except", section.excluded, [*known, *present]),
    ):
        for pattern in patterns:
            if not any(within(pattern).fullmatch(name) for name in candidates):
                raise UsageError(
                    f"{FIELD}.{field}: no parameter or module matches '{pattern}'{suggest(pattern, candidates)}; "
                    f"correct the pattern, or remove it"
                )
    only = [within(pattern) for pattern in section.only] if section.only is not None else None
    excluded = tuple(within(pattern) for pattern in section.excluded)

    def is_wanted(group: tuple[str, ...]) -> bool:
        chosen = only is None or any(regex.fullmatch(alias) for regex in only for alias in group)
        return chosen and not any(regex.fullmatch(alias) for regex in excluded for alias in group)

    return Wanted(frozenset(name for name, group in aliases.items() if is_wanted(group)), excluded)
