"""The folders with which parts of a model begin (`checkpoint.pretrained.parts`), and a part as a model of its own."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.errors import UsageError, listed, suggest
from mplug.layout.names import starred

if TYPE_CHECKING:
    from mplug.model.model import Model

FIELD = "checkpoint.pretrained.parts"
WHOLE = ""
"""The name of the model itself beside a second one, which is a part of the run."""


@dataclass(frozen=True)
class PartFolders:
    """A published folder for each of some parts of a model, by their names; `WHOLE` is that of the model itself."""

    paths: Mapping[str, Path]

    def __str__(self) -> str:
        return listed(f"'{path}'{f' ({part})' if part else ''}" for part, path in self.paths.items())


def part_of(model: "Model", part: str) -> "Model":
    """The model whose parameters, states and public names are those of a part (`Plan.parts`). It is not for running.

    UsageError if the model has no such part.
    """
    names = model.plan.parts.get(part)
    if names is None:
        known = [*model.plan.parts]
        parts = f"its parts are {listed(map(repr, known))}" if known else "it has none"
        raise UsageError(
            f"{FIELD}: the model has no part '{part}' with folders of its own{suggest(part, known)} ({parts})"
        )
    regexes = [starred(pattern) for pattern in names.tensors]

    def own(items: Mapping[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in items.items() if any(regex.fullmatch(name) for regex in regexes)}

    found = copy(model)
    found.placements, found.buffer_placements = own(model.placements), own(model.buffer_placements)
    tied = tuple(group for group in model.plan.tied if group[0] in found.placements)
    found.plan = replace(model.plan, external=names, tied=tied)
    return found


def begun_anew(model: "Model", loaded: Iterable[str]) -> list[str]:
    """The outermost modules of a model without a parameter among the `loaded` ones, and the remaining parameters."""
    loaded, found = {*loaded}, dict[str, None]()
    filled = {name[:end] for name in loaded for end in range(len(name) + 1) if name[end : end + 1] in (".", "")}
    for name in model.placements:
        if name not in loaded:
            parts = name.split(".")
            around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            found[next(module for module in around if module not in filled)] = None
    return [*found]
