"""Which modules and parameters of a model PEFT adapts, by the fields of adapter_config.json.

Names are those of the transformers library ('model.layers.0.self_attn.q_proj').
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mplug_lora.fields import FILE, value_of

ALL_LINEAR = "all-linear"


def matched_modules(fields: Mapping[str, Any], modules: Iterable[str], linears: Collection[str]) -> set[str]:
    """The modules that PEFT adapts. `linears` are those that 'all-linear' means: without the head.

    Raises ValueError, with one sentence, for a value of another type and for a pattern that cannot be compiled.
    """
    wanted = _names_or_pattern(fields, "target_modules")
    if wanted is None:
        if value_of(fields, "target_parameters") is None:
            raise ValueError(
                f"have target_modules=None in {FILE}, for which each version of PEFT has its own choice; write the "
                f"names of the adapted modules into the file"
            )
        return set()
    excluded = _names_or_pattern(fields, "exclude_modules")
    kept = [name for name in modules if not excluded or not _named(name, excluded)]
    if isinstance(wanted, str):
        everything = wanted.lower() == ALL_LINEAR
        return {name for name in kept if (name in linears if everything else re.fullmatch(wanted, name))}
    return {name for name in kept if name in wanted or (_named(name, wanted) and _in_layers(name, fields))}


def matched_parameters(fields: Mapping[str, Any], parameters: Iterable[str]) -> set[str]:
    """The parameters that PEFT adapts as such (`target_parameters`). Raises ValueError for a value of another type."""
    wanted = value_of(fields, "target_parameters")
    if wanted is None:
        return set()
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ValueError(f"have target_parameters={wanted!r} in {FILE}, which is no list of names; correct the file")
    return {name for name in parameters if _named(name, wanted)}


def of_pattern(fields: Mapping[str, Any], patterns: str, plain: str, name: str) -> Any:
    """The rank or alpha of a module: that of the first pattern in the field `patterns` that matches, or of `plain`.

    Raises ValueError for a field that is no mapping, and for a pattern that cannot be compiled.
    """
    found = value_of(fields, patterns) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"have {patterns}={found!r} in {FILE}, which is no mapping; correct the file")
    for pattern, value in found.items():
        if _compiled(rf"(.*\.)?({pattern})$", patterns).match(name):
            return value
    return value_of(fields, plain)


def _names_or_pattern(fields: Mapping[str, Any], name: str) -> Collection[str] | None:
    """A list of names, or a text that is one pattern; None if the field is null."""
    value = value_of(fields, name)
    if isinstance(value, str):
        if value.lower() != ALL_LINEAR:
            _compiled(value, name)
        return value
    if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ValueError(
            f"have {name}={value!r} in {FILE}, which is neither a text nor a list of names; correct the file"
        )
    return value


def _compiled(pattern: str, field: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"have the pattern {pattern!r} in {field} of {FILE}: {error}; correct the file") from None


def _named(name: str, words: Collection[str]) -> bool:
    """Whether a pattern matches a whole name, or a name of a list is the name or its last parts."""
    if isinstance(words, str):
        return re.fullmatch(words, name) is not None
    return name in words or any(name.endswith(f".{word}") for word in words)


def _in_layers(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether `layers_to_transform` has the number of the layer of a module; always, if it is null or empty."""
    wanted = value_of(fields, "layers_to_transform")
    if wanted is None or wanted == []:
        return True
    numbers = [wanted] if isinstance(wanted, int) else wanted
    if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
        raise ValueError(
            f"have layers_to_transform={wanted!r} in {FILE}, which is no list of numbers; correct the file"
        )
    given = _names_or_pattern(fields, "layers_pattern") or []
    patterns = [given] if isinstance(given, str) else list(given)
    regexes = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    hits = (_compiled(regex, "layers_pattern").match(name) for regex in regexes)
    hit = next((one for one in hits if one is not None), None)
    if hit is not None and not (hit[1] or "").isdecimal():  # a group or an alternative of the pattern, as in PEFT
        raise ValueError(f"have layers_pattern={given!r} in {FILE}, with which PEFT fails; correct the file")
    return hit is not None and int(hit[1]) in numbers
