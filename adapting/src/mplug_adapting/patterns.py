"""Patterns by which a config names parameters and modules of a model (`model.frozen`, `optimizer.groups`)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mplug.errors import UsageError, suggest
from mplug.layout.names import within

if TYPE_CHECKING:
    from mplug.model.built import Built


def refuse_unmatched(model: "Built", patterns: Iterable[str], field: str) -> None:
    """Raise UsageError if a pattern matches nothing; `field` is the setting, with its source."""
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(within(pattern).fullmatch(name) for name in names):
            raise UsageError(
                f"{field}: '{pattern}' matches no parameter and no module of the model"
                f"{suggest(pattern, _nameable(names))}; 'mplug explain' lists the parameters"
            )


def _nameable(names: Iterable[str]) -> list[str]:
    """Every name that a pattern can match: those of parameters and of the modules that contain them."""
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)))
