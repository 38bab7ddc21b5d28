"""What the table of a config.json must hold beside the transformers library: its fields, its defaults, and its null."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from mplug_nn import FormField, PublicForm, UnusedField
from mplug_nn.public_values import same_value


def assert_rows_of_library(form: PublicForm, library: Any) -> None:
    """Every field of the library's class is in one row, with the library's default."""
    known = {*form.fields, *form.aliases}
    assert not set(form.fields) & set(form.aliases)
    declared = dataclasses.fields(library)
    saved = library().to_dict()
    names = {*saved, *(one.name for one in declared), *library.attribute_map, *library.attribute_map.values()}
    assert names <= known, f"no row has {names - known}"
    for one in declared:
        row = form.fields.get(form.aliases.get(one.name, one.name))
        if row is not None and not isinstance(row, UnusedField | FormField):
            ours, theirs = map(_plain, (row.default, one.default))  # type: ignore[union-attr]
            assert ours is theirs or same_value(ours, theirs), one.name


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def assert_null_is_of_library(
    names: Iterable[str],
    given_of: Callable[[str], dict[str, Any]],
    read: Callable[[Mapping[str, Any]], Any],
    again: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Each config.json `given_of(name)` is refused, or it means what the library makes of it (`again`)."""
    for name in names:
        given = given_of(name)
        try:
            found = read(given)
        except ValueError:
            continue
        assert means_the_same(found, read(again(given))), name


def means_the_same(one: Any, other: Any) -> bool:
    """Whether two configs describe the same model."""
    return bool(one.computes_like(other)) if hasattr(one, "computes_like") else one == other


def assert_refused(read: Callable[[Any], Any], given: Any, sentence: str) -> None:
    """A config.json is refused in one line that contains the sentence."""
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        read(given)
    assert len(str(refused.value).splitlines()) == 1
