"""Parse YAML text to nodes, within limits on its size.

A short text can nest thousands of levels deep, or expand to billions of values through aliases. The parser refuses both
before it builds a value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mplug.errors import UsageError

DEEPEST = 64
"""Maximum levels of nesting of a config: far more than fields have, and far fewer than Python's stack."""
MOST_VALUES = 100_000
"""Maximum number of values of a config with its aliases written out."""
SUFFIXES = (".yaml", ".yml")
"""The ends of names by which a command takes a word for a config file."""
LONGEST = 1 << 22
"""Maximum size of a config file in bytes."""

UNREADABLE = (ValueError, AttributeError, LookupError, TypeError, OverflowError)
"""Exceptions of the YAML library for a scalar that does not fit its tag: 2026-13-45, '!!bool perhaps'."""


def read_text(path: Path) -> str:
    """The text of a small file; UsageError if it cannot be read, is too long, or is not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)
        text = content.decode("utf-8")
    except OSError as error:
        remedy = _similar(path) if isinstance(error, FileNotFoundError) else "use another file"
        raise UsageError(f"cannot read the config file '{path}': {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise UsageError(f"cannot read the config file '{path}': {error}; save it as UTF-8 text") from None
    if len(content) > LONGEST:
        raise UsageError(
            f"cannot read the config file '{path}': it is longer than {LONGEST:,} bytes; remove what is not a setting"
        )
    return text


def _similar(path: Path) -> str:
    """What to do about a missing file: use the one with a similar name, such as run.yaml for run.yml."""
    import difflib  # only errors need it

    try:
        names = [one.name for one in path.parent.iterdir() if one.suffix.lower() in SUFFIXES]
    except OSError:
        names = []
    stems = {Path(name).stem: name for name in names}
    near = [stem for stem in (path.stem, path.name) if stem in stems]
    near = near or difflib.get_close_matches(path.stem, stems, n=1)
    return f"did you mean '{path.with_name(stems[near[0]])}'?" if near else "use another file"


class NotYaml(UsageError):
    """The YAML library cannot parse a text."""


Sources = Callable[[int], str]
"""The name of a line of a text in error messages: 'run.yaml:12'."""


def compose(text: str, source_of: Sources) -> yaml.Node | None:
    """The root node of a text; None if it is empty. UsageError if it is not YAML (`NotYaml`) or too large."""
    with _refusing(source_of, text):
        loader = _Loader(text, source_of)
        try:
            root: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    return root


def construct(node: yaml.Node, source_of: Sources) -> Any:
    """The value of a node; a scalar that does not fit its tag, such as a date with day 45, stays text."""
    loader = yaml.SafeLoader("")
    with _refusing(source_of):
        try:
            return loader.construct_object(node, deep=True)
        except UNREADABLE:
            return _as_texts(node)
        finally:
            loader.dispose()


def name_of(node: yaml.Node, source: str) -> str:
    """The name of a field, from the key's node; UsageError if the key is a list or a mapping."""
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{source}: the name of a field must be a word, not a list or a mapping")
    return str(node.value)


def _as_texts(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_as_texts(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _as_texts(value) for key, value in node.value}
    return node.value


@contextmanager
def _refusing(source_of: Sources, text: str = "") -> Iterator[None]:
    """Turn an error of the YAML library into one sentence with the line."""
    try:
        yield
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else ord(error.character)
        source = source_of(text.count("\n", 0, error.position) + 1)
        raise NotYaml(f"{source} is not YAML: the character #x{code:04x} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        problem = " ".join(str(error.problem or error.context or error).split())
        mark = error.problem_mark or error.context_mark
        raise NotYaml(f"{source_of(mark.line + 1 if mark else 1)} is not YAML: {problem}") from None


class _Loader(yaml.SafeLoader):
    """Composes nodes, and counts for each how deep and how large it is with its aliases written out."""

    def __init__(self, text: str, source_of: Sources) -> None:
        super().__init__(text)
        self._source_of = source_of
        self._level = 0
        self._extent: dict[int, tuple[int, int]] = {}  # of a complete node, by its id: (levels, values)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. UsageError if it is nested too deep, has too many values, or contains itself."""
        if self.check_event(yaml.AliasEvent):  # it has the size of the node that it repeats
            return super().compose_node(parent, index)
        start = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level += 1
        if self._level > DEEPEST:
            raise self._too_large(f"the value is nested more than {DEEPEST} levels deep", start)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None:
            self._extent[id(node)] = self._measured(node, start)
        return node

    def _measured(self, node: yaml.Node, start: yaml.Mark) -> tuple[int, int]:
        levels, values, previous = 0, 1, start
        for child in _children(node):
            if id(child) not in self._extent:  # an alias of a node that is not complete yet
                raise self._too_large("an alias is inside the value that it repeats; write the value out", previous)
            previous = child.start_mark
            inner_levels, inner_values = self._extent[id(child)]
            levels, values = max(levels, inner_levels), values + inner_values
        if levels >= DEEPEST:
            raise self._too_large(
                f"with its aliases written out, the value is nested more than {DEEPEST} levels deep", start
            )
        if values > MOST_VALUES:
            raise self._too_large(
                f"with its aliases written out, the value contains more than {MOST_VALUES:,} values", start
            )
        return levels + 1, values

    def _too_large(self, problem: str, mark: yaml.Mark) -> UsageError:
        return UsageError(f"{self._source_of(mark.line + 1)}: {problem}")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
