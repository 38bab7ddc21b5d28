"""The settings that a resumed run changes compared with its checkpoint, and which of them may change. Torch-free.

The host compares the checkpoint's config with the config of the run, field by field. A field may change if the kind of
its section permits it (layouts and kernels give the same run, extensions only observe), or if its own annotation
permits it (`MAY_CHANGE`, `MAY_MOVE`). The host refuses every other change unless the user allows it by name: the effect
of a plugin's field on training is unknown until the plugin states it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mplug.config.binding import (
    FREE_SECTIONS,
    HOST_FIELDS,
    HOST_SECTIONS,
    KIND_OF_SECTION,
    OF_LOSSES,
    OPTIONS_OF_PRECISIONS,
    PLUGIN_SECTIONS,
    Chosen,
    RunConfig,
    host_fields,
)
from mplug.config.defaults import default_settings
from mplug.config.host_sections import Schedule
from mplug.config.sources import NAMED_SECTIONS, Key, nested, source_of
from mplug.contracts.fields import MAY_CHANGE, MAY_MOVE, Mark
from mplug.errors import UsageError, listed, printable, suggest
from mplug.model.model import Model
from mplug.registry.installed import HOST_DISTRIBUTION
from mplug.registry.rates import RATES
from mplug.run.record import provenance
from mplug.run.run import Run
from mplug.training.schedule import learning_rate
from mplug_saving.folder import damaged
from mplug_saving.saved_fields import bound, leaves, mark_of, shown

OPTION = "--allow-change"
ABSENT = "(not set)"
SAMPLES, MICRO_BATCH = "batch", "trainer.micro_batch_size"
"""The named axis of samples, and the field that decides which of them a micro batch has."""
OBSERVING = "extensions"
"""The section of plugins that only observe: all their fields may change."""
ADAPTING = "adapters"
"""The section of plugins that decide which parameters exist and are trained."""
DECIDING = (ADAPTING, OF_LOSSES)
"""Sections whose plugins a run keeps: those that it began with."""
FINGERPRINT = "data_fingerprint"
"""The key of a checkpoint's manifest that holds the fingerprint of the loader's data."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the checkpoint's.

    `refusal` says why the change needs permission; it is empty if it needs none. `source` is where the new value was
    written.
    """

    key: Key
    old: Any
    new: Any
    refusal: str = ""
    source: str = ""
    moves_data: bool = False
    """Whether the change is harmless if the loader's fingerprint is the same."""

    @property
    def field(self) -> str:
        """'optimizer.lr'."""
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.old)} -> {shown(self.new)}"


@dataclass(frozen=True)
class Changes:
    """Everything that a resumed run changes: settings, versions of plugins, and the resulting learning rate."""

    settings: list[Change] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()

    def allows(self, change: Change) -> bool:
        """Whether the user has named the field, or a section that contains it."""
        return any(change.field == name or change.field.startswith(f"{name}.") for name in self.allowed)

    @property
    def refused(self) -> list[Change]:
        """The changes that may not be made, unless the user allows them."""
        return [change for change in self.settings if change.refusal and not self.allows(change)]

    def lines(self) -> list[str]:
        """The changes as lines of a log."""
        settings = [f"{change} ({OPTION})" if self.allows(change) else str(change) for change in self.settings]
        return [*settings, *self.versions, *self.effects]

    def record(self, step: int) -> list[dict[str, Any]]:
        """The changes as plain data, for records and checkpoints."""
        settings = [
            {
                "step": step,
                "field": printable(change.field),
                "old": change.old,
                "new": change.new,
                "allowed_by_user": self.allows(change),
            }
            for change in self.settings
        ]
        return [*settings, *({"step": step, "version": printable(version)} for version in self.versions)]


def changes_on_resume(path: Path, manifest: Mapping[str, Any], run: Run, allowed: tuple[str, ...]) -> Changes:
    """What the run changes compared with the checkpoint; UsageError if a setting changes that may not.

    `allowed` are the fields and sections that the user allows to change.
    """
    if not isinstance(manifest.get("config"), dict):
        raise damaged(path, "it does not hold the config of its run")
    changes = changes_between(manifest, run, allowed)
    if changes.refused:
        raise UsageError(_refusal(path, changes.refused))
    return changes


def changes_between(manifest: Mapping[str, Any], run: Run, allowed: tuple[str, ...] = ()) -> Changes:
    """What a run changes compared with the run that a manifest describes, refused or not."""
    settings = list(_Comparison.of(manifest, run).changed_settings())
    return Changes(settings, _versions(manifest, run), _effects(manifest, run.config), allowed)


def refuse_unknown_fields(manifest: Mapping[str, Any], config: RunConfig, allowed: Iterable[str]) -> None:
    """Raise UsageError for a name that is no field or section of the checkpoint's config or of the run's."""
    names: dict[str, None] = {}
    for tree in (manifest.get("config"), config.resolved()):
        names |= dict.fromkeys(_names(tree))
    for name in allowed:
        if name not in names:
            raise UsageError(f"{OPTION} '{name}': this run's config has no such field or section{suggest(name, names)}")


def _names(tree: Any, prefix: str = "") -> Iterator[str]:
    for name, inner in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{name}"
        yield from _names(inner, f"{prefix}{name}.")


def _refusal(path: Path, refused: list[Change]) -> str:
    lines = []
    for change in refused:
        source, reason = f" ({change.source})" if change.source else "", f": {change.refusal}"
        lines.append(f"  {change}{source}{'' if change.refusal == COURSE else reason}")
    keys = [change.key for change in refused]
    sections = {key[0] for key in keys if key[0] in NAMED_SECTIONS and key[1:] == ("name",)}
    names = dict.fromkeys(change.key[0] if change.key[0] in sections else change.field for change in refused)
    return (
        f"checkpoint '{path}' was trained with other settings, and the run would train differently with these:\n"
        + "\n".join(lines)
        + f"\nto resume with the new settings, add {OPTION} {','.join(names)}\n"
        f"to continue as before, remove the new settings"
    )


def same_data(path: Path, manifest: Mapping[str, Any], fingerprint: str | None, changes: Changes) -> None:
    """Raise UsageError if the loader's data is not the data of the checkpoint, or if a change leaves this unknown.

    Data counts as the same if no setting that moves it has changed and one of the fingerprints is missing.
    """
    before, moved = manifest.get(FINGERPRINT), [change for change in changes.settings if change.moves_data]
    if any(changes.allows(change) for change in moved) or "data" in changes.allowed:
        return
    fields = [change.field for change in moved] or ["data"]
    if before is not None and fingerprint is not None and before != fingerprint:
        problem = "differs in content from the data that the checkpoint was trained on"
    elif before != fingerprint and moved:
        problem = "is in another place, and its loader states no fingerprint that shows whether it is the same data"
    else:
        return
    raise UsageError(
        f"checkpoint '{path}': the training data {problem}; set the data of the checkpoint, or add {OPTION} "
        f"{','.join(fields)}"
    )


COURSE = "it changes how training continues"
UNDECLARED = "{owner} does not declare that it may change"
UNVERIFIED = "the checkpoint holds no fingerprint of its data, so the new data may differ"


@dataclass(frozen=True)
class _Comparison:
    """The config of a checkpoint's run and the config of the resumed run, section by section."""

    manifest: Mapping[str, Any]
    run: Run
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    recorded: Mapping[str, Mapping[str, Any]]
    """The plugins of the checkpoint's run, by label."""

    @classmethod
    def of(cls, manifest: Mapping[str, Any], run: Run) -> "_Comparison":
        recorded = {plugin["plugin"]: plugin for plugin in manifest["provenance"]["plugins"]}
        return cls(manifest, run, manifest["config"], run.config.resolved(), recorded)

    def changed_settings(self) -> Iterator[Change]:
        """Every changed setting, in the order of the config's sections."""
        for section in NAMED_SECTIONS:
            yield from self._of_named(section)
        for section in PLUGIN_SECTIONS:
            found = list(self._of_plugins(section))
            yield from found
            refused = {change.key[:2] for change in found if change.refusal}
            variances = _of_variances(section, self.manifest, self.run)
            yield from (change for change in variances if change.key not in refused)
        for section, model in HOST_SECTIONS.items():
            yield from self._of_host(section, model)

    def _compared(
        self, key: Key, model: type[BaseModel] | BaseModel | None, was: Any, now: Any, judge: "_Judge"
    ) -> Iterator[Change]:
        before, after = (dict(leaves(model, values)) for values in (was, now))
        for inner in dict.fromkeys([*before, *after]):
            was, now = before.get(inner, ABSENT), after.get(inner, ABSENT)
            if was != now:
                source = source_of(self.run.config.settings, (*key, *inner)) or ""
                yield judge((*key, *inner), was, now, mark_of(model, inner), source)

    def _of_named(self, section: str) -> Iterator[Change]:
        """The changes of a section that names one plugin."""
        chosen = next(chosen for chosen in self.run.config.chosen if chosen.section == (section,))
        was, now = dict(self.old.get(section) or {}), self.new[section]
        if _is_same(chosen, was.get("name"), self.recorded):
            defaults = {name: one.default for name, one in host_fields(section, chosen.plugin).items()}
            hosts = {name: list(one) if isinstance(one, tuple) else one for name, one in defaults.items()}
            own = {name: value for name, value in was.items() if name not in hosts}
            was = {**hosts, **was, **bound(chosen, own), "name": now["name"]}
            judge = _bymark_of(chosen, self.manifest)
            for model, is_hosts in ((chosen.config, False), (HOST_FIELDS.get(section), True)):
                before, after = (
                    {name: value for name, value in tree.items() if (name in hosts) is is_hosts} for tree in (was, now)
                )
                yield from self._compared((section,), model, before, after, judge)
        else:  # compare only the fields that both plugins have
            was["name"] = _named(was.get("name"), self.recorded.get(_label(section, was.get("name"))), chosen)
            common = {name: value for name, value in was.items() if name in now}
            now = {name: value for name, value in now.items() if name in was}
            yield from self._compared((section,), None, common, now, _refused)

    def _of_plugins(self, section: str) -> Iterator[Change]:
        """The changes of a section that names several plugins: its own fields, its list of plugins, and their fields.

        The section's own fields say which strategies and kernels are chosen. Sections of plugins that are not chosen
        change nothing.
        """
        old, new = self.old.get(section) or {}, self.new[section]
        removed = section in FREE_SECTIONS  # there, `NAME: false` removes a plugin
        own, other = (
            {n: v for n, v in tree.items() if not isinstance(v, dict) and not (v is False and removed)}
            for tree in (old, new)
        )
        yield from self._compared((section,), None, own, other, _free)
        plugins = [one for one in self.run.config.chosen if one.section[0] == section and len(one.section) == 2]
        held = {label for label in self.recorded if label.startswith(f"{section}/")}
        if not other and section != OPTIONS_OF_PRECISIONS:  # `trainer.precision` says which one is used
            for label in sorted(held ^ {chosen.label for chosen in plugins}):
                key = (section, label.partition("/")[2])
                was, now = ("used", "not used") if label in held else ("not used", "used")
                yield Change(key, was, now, COURSE if section in DECIDING else "")
        for chosen in plugins:
            if chosen.label in held:
                saved = old.get(chosen.section[1], old.get(chosen.entry.name))
                values = bound(chosen, saved if isinstance(saved, dict) else {})
                judge = _free if section == OBSERVING else _bymark_of(chosen, self.manifest)
                yield from self._compared(chosen.section, chosen.plugin.Config, values, new[chosen.section[1]], judge)

    def _of_host(self, section: str, model: type[BaseModel]) -> Iterator[Change]:
        """The changes of a section of the host."""
        was = {**nested(default_settings())[section], **(self.old.get(section) or {})}
        if section == "trainer":
            was["precision"] = _saved_precision(was["precision"], self.recorded, self.run.config)
        yield from self._compared((section,), model, was, self.new[section], _bymark_of(None, self.manifest))


_Judge = Callable[[Key, Any, Any, Mark | None, str], Change]


def _free(key: Key, old: Any, new: Any, mark: Mark | None, source: str) -> Change:
    return Change(key, old, new, source=source)


def _refused(key: Key, old: Any, new: Any, mark: Mark | None, source: str) -> Change:
    return Change(key, old, new, COURSE, source)


def _bymark_of(chosen: Chosen | None, manifest: Mapping[str, Any]) -> _Judge:
    """Judge by the field's mark. Without a mark, a field of the host, a model or an optimizer decides training."""
    is_course = chosen is None or len(chosen.section) == 1
    refusal = COURSE if is_course or chosen is None else UNDECLARED.format(owner=chosen.label)
    verifiable = manifest.get(FINGERPRINT) is not None

    def judge(key: Key, old: Any, new: Any, mark: Mark | None, source: str) -> Change:
        if mark == MAY_MOVE:
            return Change(key, old, new, "" if verifiable else UNVERIFIED, source, moves_data=True)
        return Change(key, old, new, "" if mark == MAY_CHANGE else refusal, source)

    return judge


def _of_variances(section: str, manifest: Mapping[str, Any], run: Run) -> Iterator[Change]:
    """The declared variances (`mplug.Variance`) of a section's plugins that the run adds, drops or changes."""
    old, new = (
        manifest.get("varies") or {},
        {label: printable(variance.reason) for label, variance in run.variances.items()},
    )
    for label in sorted({*old, *new}):
        if label.startswith(f"{section}/") and old.get(label) != new.get(label):
            was, now = (reasons.get(label, "exact up to rounding") for reasons in (old, new))
            yield Change(tuple(label.split("/", 1)), was, now, COURSE)


def _label(section: str, word: Any) -> str:
    return f"{KIND_OF_SECTION[section]}/{str(word).rpartition('/')[2]}"


def _is_same(chosen: Chosen, word: Any, before: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's word for a plugin means the chosen plugin, of the same distribution."""
    label = _label(chosen.section[0], word)
    return chosen.label == label and before.get(label, {}).get("distribution") == chosen.entry.distribution


def _named(word: Any, recorded: Mapping[str, Any] | None, chosen: Chosen) -> Any:
    """The checkpoint's name for a plugin; with its distribution, if the name now means a plugin of another one."""
    if recorded is not None and recorded["plugin"] == chosen.label:
        return f"{word} of {recorded['distribution']}"
    return word


def _saved_precision(word: Any, recorded: Mapping[str, Mapping[str, Any]], config: RunConfig) -> Any:
    """The checkpoint's word for its precision; that of the run if both mean the same plugin of the same distribution.

    Checkpoints without a record of their precision have one of the host's.
    """
    label = f"{OPTIONS_OF_PRECISIONS}/{str(word).rpartition('/')[2]}"
    before = recorded.get(label, {}).get("distribution", HOST_DISTRIBUTION)
    chosen = next(chosen for chosen in config.chosen if chosen.section[0] == OPTIONS_OF_PRECISIONS)
    if chosen.label != label:
        return word
    return config.trainer.precision if chosen.entry.distribution == before else f"{word} of {before}"


def _versions(manifest: Mapping[str, Any], run: Run) -> list[str]:
    """Changes of version or distribution of the host, torch and plugins."""
    old, new = manifest["provenance"], provenance(run)
    lines = [f"{name}: {old[name]} -> {new[name]}" for name in ("mplug", "torch") if old[name] != new[name]]
    before = {plugin["plugin"]: f"{plugin['distribution']} {plugin['version']}" for plugin in old["plugins"]}
    for plugin in new["plugins"]:
        label, now = plugin["plugin"], f"{plugin['distribution']} {plugin['version']}"
        if label in before and before[label] != now:
            lines.append(f"{label}: {before[label]} -> {now}")
    return lines


def _effects(manifest: Mapping[str, Any], config: RunConfig) -> list[str]:
    """A line about the learning rate of the next step, if the changes alter it."""
    old, step = manifest["config"], manifest["step"] + 1
    defaults = nested(default_settings())["schedule"]
    try:
        schedule = Schedule.model_validate({**defaults, **(old.get("schedule") or {})})
        RATES.load(schedule.name)
    except ValidationError as error:
        return [f"the checkpoint's schedule cannot be compared: {listed(str(e['msg']) for e in error.errors())}"]
    except ValueError as error:  # that of another distribution, which is not installed now
        return [f"the checkpoint's schedule cannot be compared: {error}"]
    was = learning_rate(step, float(old["optimizer"]["lr"]), schedule, int(old["trainer"]["steps"]))
    now = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
    if was == now:
        return []
    return [f"the learning rate of step {step} is {now:.4g}; with the checkpoint's settings it was {was:.4g}"]


def refuse_other_micro_batches(model: Model, changes: "Changes") -> None:
    """Raise UsageError if a module mixes the samples of a micro batch and the resumed run changes the micro batches."""
    mixing = [module for module in model.mixing if SAMPLES in (module.axes or ())]
    for change in changes.settings if mixing else ():
        if change.field == MICRO_BATCH and not changes.allows(change):
            raise UsageError(
                f"{mixing[0].label} mixes the samples of a micro batch, and the checkpoint was trained with other "
                f"micro batches ({change}), so the run would train differently; remove the change, or add "
                f"{OPTION} {MICRO_BATCH}"
            )
