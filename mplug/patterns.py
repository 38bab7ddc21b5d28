"""Patterns of dotted names: '*' stands for one component of a name."""

import re
from collections.abc import Iterable


def compiled(pattern: str) -> re.Pattern[str]:
    """What a whole name must match."""
    return re.compile(_expression(pattern))


def within(pattern: str) -> re.Pattern[str]:
    """What a parameter's whole name must match so that the pattern names it, or a module that it lies in."""
    return re.compile(rf"{_expression(pattern)}(\..+)?")


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches."""
    return [name for name in names if compiled(pattern).fullmatch(name)]


def _expression(pattern: str) -> str:
    return r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
