"""Dotted names of modules and parameters: patterns with '*', and roles."""

import re
from collections.abc import Iterable, Iterator


def compiled(pattern: str) -> re.Pattern[str]:
    """The regex of a pattern; use it with `fullmatch`."""
    return re.compile(_expression(pattern))


def starred(pattern: str) -> re.Pattern[str]:
    """The regex of a pattern with a group for each '*'; use it with `fullmatch`."""
    return re.compile(r"\.".join("([^.]+)" if part == "*" else re.escape(part) for part in pattern.split(".")))


def within(pattern: str) -> re.Pattern[str]:
    """The regex of a pattern that also matches every name inside a matched module; use it with `fullmatch`."""
    return re.compile(rf"{_expression(pattern)}(\..+)?")


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches."""
    return [name for name in names if compiled(pattern).fullmatch(name)]


def _expression(pattern: str) -> str:
    return r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))


def role_of(name: str) -> str:
    """A name with its indices starred: 'blocks.3.attn' -> 'blocks.*.attn'."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def modules_around(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, the outermost first: 'blocks', 'blocks.3', 'blocks.3.attn', ..."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))
