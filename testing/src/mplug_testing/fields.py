"""Whether every field of a plugin's Config has an effect that its suite sees.

For each field the suite takes another valid value and compares what it sees (`PluginSuite.evidence`) with what it sees
of the plugin's tiny run. The values come from the field's type (`values.py`), or from the author: `examples` of the
suite or of the field. A field that has an effect only together with other settings names them in `beside`. A field
without a visible effect is in `without_effect`, with the reason.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mplug.errors import UsageError, listed, suggest
from mplug.registry.entry_points import BrokenPlugin
from mplug_testing.faults import Fault, naming_failures, require
from mplug_testing.values import other_values

OWN = "with the suite's own settings"
TRIED = 4
"""Maximum number of accepted values of a field that are tried."""

Settings = Mapping[str, Any]


class Watching(Protocol):
    """What a suite has for these tests (`PluginSuite`)."""

    plugin: ClassVar[str]
    examples: ClassVar[Mapping[str, Sequence[Any]]]
    beside: ClassVar[Mapping[str, Settings]]
    without_effect: ClassVar[Mapping[str, str]]
    trains_ahead: ClassVar[bool]

    def fields(self) -> dict[str, Any]:
        """The fields of the plugin's `Config`."""

    def with_fields(self, fields: Settings, beside: Settings) -> dict[str, Any]:
        """The settings of the tiny run with other values of fields, and with the settings `beside` them."""

    def accept(self, settings: Settings) -> None:
        """UsageError if a Config refuses the settings."""

    def config_of(self, settings: Settings) -> Any:
        """The plugin's own Config object."""

    def values_for(self, field: str) -> Sequence[Any] | None:
        """Other values of a field; None if they are derived from its type."""

    def evidence(self, settings: Settings) -> Iterator[tuple[str, Any]]:
        """What the suite sees of a run."""

    def foresee(self, runs: Sequence[Settings]) -> None:
        """Called before `evidence`."""


class _Refused(Exception):
    """The run refuses settings; the message is the reason."""


class _Evidence:
    """What a suite sees of one run, stage by stage; a stage is computed when it is first read."""

    def __init__(self, suite: Watching, settings: Settings, where: str) -> None:
        self.settings, self._where = settings, where
        self._stages, self._seen = suite.evidence(settings), list[tuple[str, Any]]()

    def stage(self, number: int) -> tuple[str, Any] | None:
        """(what it is, its value), or None after the last stage."""
        while len(self._seen) <= number:
            try:
                with naming_failures(self._where):
                    found = next(self._stages, None)
            except Fault as fault:
                _reraise_refusal(fault)
                raise
            if found is None:
                return None
            self._seen.append(found)
        return self._seen[number]


def _reraise_refusal(fault: Fault) -> None:
    """Raise _Refused if a Fault comes from a refusal of the plugin, and from no broken plugin."""
    cause: BaseException | None = fault
    while cause is not None:
        if isinstance(cause, UsageError) and not isinstance(cause, BrokenPlugin):
            raise _Refused(str(cause)) from None
        cause = cause.__cause__


def require_effects(suite: Watching) -> None:
    """Raise Fault for the first field whose other values change nothing that the suite sees."""
    fields, checker = suite.fields(), _Checker(suite)
    for name, table in (
        ("examples", suite.examples),
        ("beside", suite.beside),
        ("without_effect", suite.without_effect),
    ):
        for field in table:
            require(
                field in fields,
                f"the suite's `{name}` names '{field}', which is no field of the Config of '{suite.plugin}'"
                f"{suggest(field, fields)}",
            )
    for field, reason in suite.without_effect.items():
        require(
            isinstance(reason, str) and len(reason.split()) > 1,
            f"`without_effect` gives no reason for the field '{field}'; say in a few words why no test can see it",
        )
    visible = {field: described for field, described in fields.items() if field not in suite.without_effect}
    if suite.trains_ahead:
        suite.foresee(checker.foreseen(visible))
    for field, described in visible.items():
        checker.require_effect(field, described)


class _Checker:
    """Compares runs with other values of a field with the run with its own value."""

    def __init__(self, suite: Watching) -> None:
        self.suite, self._base, self._configs = suite, dict[str, _Evidence](), dict[str, Any]()
        self._twin: tuple[_Evidence, _Evidence] | None = None

    def require_effect(self, field: str, described: Any) -> None:
        """Raise Fault unless another value changes what the suite sees, or the author's values are refused."""
        suite, given = self.suite, self.suite.values_for(field)
        own, current, values = self._values(field, described)
        accepted, refused = list[Any](), list[str]()
        for value in values:
            changed = suite.with_fields({field: value}, suite.beside.get(field, {}))
            try:
                suite.accept(changed)
            except UsageError as error:
                refused.append(f"{value!r}: {error}")
                continue
            try:
                if self._differs(own, changed, f"with {field}={value!r}"):
                    return
                accepted.append(value)
            except _Refused as reason:
                refused.append(f"{value!r}: {reason}")
            if len(accepted) == TRIED:
                break
        if accepted:
            raise Fault(_sentence(suite, field, current, accepted))
        if given is None:
            raise Fault(_asking(suite, field, described, refused))
        require(refused, f"`examples` gives no value for the field '{field}'; give one that differs from {current!r}")

    def _values(self, field: str, described: Any) -> tuple[Settings, Any, Sequence[Any]]:
        """(the settings beside the field, its own value with them, other values to try)."""
        own = self.suite.with_fields({}, self.suite.beside.get(field, {}))
        key = _key(own)
        if key not in self._configs:
            self._configs[key] = _config(self.suite, own, field)
        current, given = getattr(self._configs[key], field), self.suite.values_for(field) or described.examples
        if given is None:
            given = described.examples  # those of the field's own description
        if given is not None:
            return own, current, given
        return own, current, list(other_values(described.annotation, described.metadata, current))

    def foreseen(self, fields: Mapping[str, Any]) -> list[Settings]:
        """The runs that `require_effect` looks at for these fields if the first accepted value has an effect."""
        runs: list[Settings] = [self.suite.with_fields({}, {})]
        for field, described in fields.items():
            own, _, values = self._values(field, described)
            runs.append(own)
            for value in values:
                changed = self.suite.with_fields({field: value}, self.suite.beside.get(field, {}))
                try:
                    self.suite.accept(changed)
                except UsageError:
                    continue
                runs.append(changed)
                break
        return runs

    def _differs(self, own: Settings, changed: Settings, where: str) -> bool:
        key = _key(own)
        if key not in self._base:
            self._base[key] = _Evidence(self.suite, own, OWN)
        base, other = self._base[key], _Evidence(self.suite, changed, where)
        number = 0
        while True:
            found, expected = other.stage(number), self._own(base, number)
            if found != expected:
                return True
            if found is None:
                return False
            number += 1

    def _own(self, base: _Evidence, number: int) -> tuple[str, Any] | None:
        try:
            if self._twin is None:
                self._twin = base, _Evidence(self.suite, base.settings, OWN)
            found = base.stage(number)
            if self._twin[0] is base:
                again = self._twin[1].stage(number)
                require(found == again, f"two equal runs of '{self.suite.plugin}' have different {found and found[0]}")
            return found
        except _Refused as reason:
            raise Fault(f"the suite's own settings are refused: {reason}") from None


def _key(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True, default=str)


def _config(suite: Watching, settings: Settings, field: str) -> Any:
    try:
        return suite.config_of(settings)
    except UsageError as error:
        raise Fault(f"with the settings in `beside` for the field '{field}', the config is refused: {error}") from None


def _sentence(suite: Watching, field: str, current: Any, accepted: Sequence[Any]) -> str:
    return (
        f"the field '{field}' of '{suite.plugin}' has no effect: with {listed(map(repr, accepted))} the suite sees "
        f"what it sees with {current!r}; use the field, or say in the suite with which values it has an effect "
        f"(`examples`), with which other settings (`beside`), or why no test can see it (`without_effect`)"
    )


def _asking(suite: Watching, field: str, described: Any, refused: list[str]) -> str:
    reason = f"no other value can be derived from its type ({described.annotation})"
    if refused:
        reason = f"every value that its type allows is refused ({refused[0]})"
    return (
        f"the suite cannot see whether the field '{field}' of '{suite.plugin}' has an effect: {reason}; give other "
        f"valid values in `examples = {{'{field}': [...]}}`, further settings in `beside`, or the reason in "
        f"`without_effect`"
    )


def digest(*tensors: Any) -> str:
    """A short text that differs for tensors, or nested containers of tensors and plain values, with other bits."""
    from hashlib import blake2b

    made = blake2b(digest_size=16)
    for one in _leaves(tensors):
        made.update(one)
    return made.hexdigest()


def _leaves(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _leaves(value[name])
    elif isinstance(value, list | tuple):
        yield b"["
        for one in value:
            yield from _leaves(one)
        yield b"]"
    else:
        yield repr(value).encode()
