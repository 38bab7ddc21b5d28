"""The run's config: settings from every source bound to typed sections, one for each chosen plugin.

First raw settings are merged (`mplug.settings`), then names are resolved, then each chosen plugin's `Config` binds its
own section. All errors are reported at once, each with its path, its source and the word that was probably meant.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from mplug import sections
from mplug.errors import UsageError, listed, suggest
from mplug.mesh import parse_layout
from mplug.registry import Entry, Registry
from mplug.settings import (
    NAMED_SECTIONS,
    Key,
    Settings,
    from_mapping,
    merge,
    nested,
    read_file,
    source_of,
)
from mplug.slots import SLOT_KINDS

KIND_OF_SECTION = {"model": "models", "optimizer": "optimizers", "data": "data"}
HOST_SECTIONS: dict[str, type[sections.Section]] = {
    "trainer": sections.Trainer,
    "schedule": sections.Schedule,
    "checkpoint": sections.Checkpoint,
}
PLUGIN_SECTIONS = ("parallel", "kernels", "extensions")
SECTIONS = (*NAMED_SECTIONS, *PLUGIN_SECTIONS, *HOST_SECTIONS)


@dataclass(frozen=True)
class Chosen:
    """A plugin that the config names: where it comes from, its class, and its bound section."""

    entry: Entry
    plugin: type[Any]
    config: Any
    section: Key

    @property
    def label(self) -> str:
        """'models/gpt'."""
        return self.entry.label


@dataclass(frozen=True)
class Parallel:
    """The layout: each named strategy's degree, and who takes the ranks that are left."""

    layout: str
    degrees: Mapping[str, int]
    data: str | None


@dataclass(frozen=True)
class Kernels:
    """Which kernel plugin the config names for each kind of slot (labels, as 'kernels/NAME').

    `default` fills every slot that it can and that no kind names another plugin for.
    """

    kinds: Mapping[str, str]
    default: str | None

    def chosen(self, kind: str) -> str | None:
        """The label of the plugin for a kind of slot; None leaves the composition in plain torch."""
        return self.kinds.get(kind, self.default)


@dataclass(frozen=True)
class RunConfig:
    """A complete, valid config. `model`, `optimizer` and `data` are the chosen plugins' own `Config` objects."""

    model: Any
    optimizer: Any
    data: Any
    trainer: sections.Trainer
    schedule: sections.Schedule
    checkpoint: sections.Checkpoint
    parallel: Parallel
    kernels: Kernels
    chosen: tuple[Chosen, ...]
    settings: Settings

    def section_of(self, label: str) -> Any:
        """The bound section of a chosen plugin, or None."""
        return next((chosen.config for chosen in self.chosen if chosen.label == label), None)

    def resolved(self) -> dict[str, Any]:
        """Every value of the run as a plain nested mapping, plugins' defaults and presets written out."""
        tree: dict[str, Any] = {}
        for section in NAMED_SECTIONS:
            tree[section] = {"name": self.settings[section, "name"].value, **_plain(getattr(self, section))}
        said = nested(self.settings)
        for section in PLUGIN_SECTIONS:
            tree[section] = dict(said.get(section, {}))
        for chosen in self.chosen:
            if len(chosen.section) == 2:
                tree[chosen.section[0]][chosen.section[1]] = _plain(chosen.config)
        tree |= {section: _plain(getattr(self, section)) for section in HOST_SECTIONS}
        return {section: tree[section] for section in SECTIONS}

    def sources(self) -> dict[str, str]:
        """Where every value of `resolved()` was written; a plugin's own default names the plugin."""
        owners = {chosen.section: f"default of {chosen.label}" for chosen in self.chosen}
        return {
            ".".join(key): source_of({key: self.settings[key]}, key) or ""
            if key in self.settings
            else next((owner for section, owner in owners.items() if key[: len(section)] == section), "")
            for key in from_mapping(self.resolved(), "")
        }


def default_settings() -> Settings:
    """The default run."""
    return read_file(Path(__file__).with_name("default.yaml"), "default.yaml")


def resolve(registry: Registry, base: Settings, overrides: Settings) -> RunConfig:
    """The config of a run: `overrides` (a file, the command line) over the model's preset over `base`.

    Raises UsageError that lists every problem, each with its path and source.
    """
    return _Resolver(registry, base, overrides).run()


class _Resolver:
    def __init__(self, registry: Registry, base: Settings, overrides: Settings) -> None:
        self.registry = registry
        self.problems: list[str] = []
        self.chosen: list[Chosen] = []
        self.loaded: dict[str, type[Any]] = {}
        self.settings = merge(base, overrides)
        self.settings = merge(merge(base, self._preset()), overrides)
        self.tree = nested(self.settings)

    def run(self) -> RunConfig:
        for section in self.tree:
            if section not in SECTIONS:
                self._problem((section,), f"unknown section{suggest(section, SECTIONS)} (sections: {listed(SECTIONS)})")
            elif not isinstance(self.tree[section], dict | None):
                self._problem((section,), f"must be a section with fields of its own, not {self.tree[section]!r}")
                self.tree[section] = {}
        named = {section: self._named(section) for section in NAMED_SECTIONS}
        hosts = {
            section: self._bind((section,), model, self._said(section)) for section, model in HOST_SECTIONS.items()
        }
        parallel, kernels = self._parallel(), self._kernels()
        self._extensions()
        self._check_batch(hosts["trainer"])
        if self.problems:
            raise UsageError("\n".join(self.problems))
        return RunConfig(
            **named, **hosts, parallel=parallel, kernels=kernels, chosen=tuple(self.chosen), settings=self.settings
        )

    def _said(self, section: str) -> dict[str, Any]:
        return dict(self.tree.get(section) or {})

    def _problem(self, key: Key, message: str) -> None:
        source = source_of(self.settings, key)
        self.problems.append(f"{'.'.join(key)}{f' ({source})' if source else ''}: {message}")

    def _plugin(self, kind: str, word: Any, key: Key) -> Entry | None:
        try:
            entry = self.registry.find(kind, str(word))
            if entry.label not in self.loaded:
                self.loaded[entry.label] = self.registry.load(entry)
            return entry
        except UsageError as error:
            self._problem(key, str(error))
            return None

    def _preset(self) -> Settings:
        """The settings of the preset that the config names, if any."""
        name, preset = (self.settings.get(("model", field)) for field in ("name", "preset"))
        if preset is None or preset.value is None or name is None:
            return {}
        entry = self._plugin("models", name.value, ("model", "name"))
        if entry is None:
            self.problems.clear()  # reported where the model itself is bound
            return {}
        presets = getattr(self.loaded[entry.label], "presets", {})
        if preset.value not in presets:
            known = list(map(str, presets))
            message = f"'{name.value}' has no preset '{preset.value}'{suggest(str(preset.value), known)}"
            self._problem(("model", "preset"), f"{message} (it has {listed(known)})")
            return {}
        return from_mapping(presets[preset.value], f"preset {preset.value}")

    def _named(self, section: str) -> Any:
        said = self._said(section)
        said.pop("preset", None) if section == "model" else None
        word = said.pop("name", None)
        if not word:
            self._problem((section, "name"), f"name the plugin to use ({listed(self.registry.names(_kind(section)))})")
            return None
        entry = self._plugin(KIND_OF_SECTION[section], word, (section, "name"))
        return self._choose(entry, (section,), said) if entry else None

    def _choose(self, entry: Entry, key: Key, said: dict[str, Any]) -> Any:
        plugin = self.loaded[entry.label]
        config = self._bind(key, plugin.Config, said)
        self.chosen.append(Chosen(entry, plugin, config, key))
        return config

    def _bind(self, key: Key, model: type[BaseModel], said: dict[str, Any]) -> Any:
        try:
            return model.model_validate(said)
        except ValidationError as error:
            for problem in error.errors():
                self._problem((*key, *map(str, problem["loc"])), _explained(problem, model))
            return None

    def _parallel(self) -> Parallel:
        said = self._said("parallel")
        word, data = str(said.pop("layout", None) or ""), said.pop("data", None)
        names = self.registry.names("parallel")
        degrees: dict[str, int] = {}
        try:
            degrees = parse_layout(word, names)
        except UsageError as error:
            self._problem(("parallel", "layout"), str(error))
        self._sub_sections("parallel", list(degrees), said)
        return Parallel(word, degrees, data)

    def _kernels(self) -> Kernels:
        said = self._said("kernels")
        words = {kind: said.pop(kind) for kind in (*SLOT_KINDS, "default") if said.get(kind)}
        entries = {kind: self._plugin("kernels", word, ("kernels", kind)) for kind, word in words.items()}
        found = dict.fromkeys(str(words[kind]) for kind, entry in entries.items() if entry)
        self._sub_sections("kernels", found, said, (*SLOT_KINDS, "default"))
        labels = {kind: entry.label for kind, entry in entries.items() if entry}
        default = labels.pop("default", None)
        return Kernels(labels, default)

    def _extensions(self) -> None:
        said = self._said("extensions")
        self._sub_sections("extensions", list(said), said)

    def _sub_sections(
        self, section: str, words: Iterable[str], said: dict[str, Any], fields: Iterable[str] = ()
    ) -> None:
        """Bind `section.NAME` for every chosen plugin; other installed plugins' sub-sections are left alone."""
        for word in words:
            entry = self._plugin(section, word, (section, word))
            if entry and not any(chosen.label == entry.label for chosen in self.chosen):
                self._choose(entry, (section, entry.name), dict(said.get(entry.name) or {}))
        known = {entry.name for entry in self.registry.entries(section)}
        for name in said:
            if name not in known and section != "extensions":
                words_here = [*fields, *known]
                self._problem((section, name), f"no such field or plugin{suggest(name, words_here)}")

    def _check_batch(self, trainer: sections.Trainer | None) -> None:
        if trainer and trainer.global_batch_size % trainer.micro_batch_size:
            self._problem(
                ("trainer", "global_batch_size"),
                f"{trainer.micro_batch_size} samples of a micro batch do not divide {trainer.global_batch_size}; "
                f"choose a multiple of trainer.micro_batch_size",
            )


def _kind(section: str) -> str:
    return KIND_OF_SECTION[section]


def _explained(problem: Any, model: type[BaseModel]) -> str:
    if problem["type"] == "extra_forbidden":
        field, fields = str(problem["loc"][-1]), _fields(model, problem["loc"][:-1])
        return f"unknown field{suggest(field, fields)} (fields: {listed(sorted(fields))})"
    if problem["type"] == "missing":
        return "is required"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message if problem["type"] == "value_error" else f"{message}, not {problem['input']!r}"


def _fields(model: Any, path: tuple[Any, ...]) -> list[str]:
    for name in path:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _plain(config: Any) -> Any:
    return config.model_dump(mode="json") if config is not None else {}


def schema(registry: Registry, names: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of a config file whose sections name these plugins ({'model': 'gpt', ...})."""
    fields: dict[str, Any] = {}
    for section in NAMED_SECTIONS:
        plugin = registry.load(registry.find(_kind(section), names[section]))
        extra: dict[str, Any] = {"name": (sections.PluginName, ...)}
        if section == "model":
            extra["preset"] = (str | None, None)
        fields[section] = (_partial(create_model(section, __base__=plugin.Config, **extra)), None)
    for section, model in HOST_SECTIONS.items():
        fields[section] = (_partial(model), None)
    kernels: dict[str, Any] = dict.fromkeys((*SLOT_KINDS, "default"), (str | None, None))
    fields["kernels"] = (create_model("kernels", __config__=ConfigDict(extra="allow"), **kernels), None)
    parallel: dict[str, Any] = {"layout": (str, ""), "data": (str | None, None)}
    fields["parallel"] = (create_model("parallel", __config__=ConfigDict(extra="allow"), **parallel), None)
    fields["extensions"] = (dict[str, Any], None)
    whole = create_model("mplug run", __config__=ConfigDict(extra="forbid"), **fields)
    return TypeAdapter(whole).json_schema()


def _partial(model: type[BaseModel]) -> type[BaseModel]:
    """The same fields, none of them required: a config file says only what it changes."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        optional = copy(field)
        optional.default = None if field.is_required() else field.default
        fields[name] = (field.annotation, optional)
    return create_model(model.__name__, __config__=ConfigDict(extra="forbid"), **fields)
