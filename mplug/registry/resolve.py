"""Resolve raw settings to a config: names become plugins, and the `Config` of each chosen plugin binds its section.

The resolver reports all problems at once, each with its field, its source and a suggestion for a misspelt word.
"""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from mplug.config import host_sections as sections
from mplug.config.binding import (
    FREE_SECTIONS,
    HOST_FIELDS,
    HOST_SECTIONS,
    KIND_OF_SECTION,
    OF_LOSSES,
    OPTIONS_OF_PRECISIONS,
    SECTIONS,
    Chosen,
    Kernels,
    Parallel,
    RunConfig,
    host_fields,
)
from mplug.config.defaults import is_default, under_fine_tuning
from mplug.config.entry import Entry
from mplug.config.family import family_fields
from mplug.config.problems import NO_SECTION
from mplug.config.sources import NAMED_SECTIONS, RECIPE, Key, Settings, from_mapping, merge, nested, source_of
from mplug.errors import UsageError, brief, listed, quoted, suggest
from mplug.layout.mesh import parse_layout
from mplug.registry.beginnings import beginnings, names_some
from mplug.registry.bind_section import bind, preset_of
from mplug.registry.entry_points import BrokenPlugin, Registry
from mplug.registry.fallbacks import missing_defaults, missing_message, without_missing
from mplug.registry.provided import provided
from mplug.registry.rates import RATES


def resolve(registry: Registry, base: Settings, overrides: Settings) -> RunConfig:
    """The config of a run: `overrides` (a recipe, a file, the command line) over the model's preset over `base`.

    If `overrides` name weights to begin with, or adapters, the defaults of fine-tuning lie over those of `base`.
    If `overrides` name a published checkpoint (`checkpoint.pretrained`), its description decides the section 'model';
    published checkpoints of parts decide the sections of these parts.
    Raises a UsageError that lists every problem with its field and source; a BrokenPlugin if a plugin is at fault.
    """
    if names_some(overrides):
        base, overrides = beginnings(registry).settings(registry, base, overrides)
    return _Resolver(registry, base, overrides).run()


class _Resolver:
    def __init__(self, registry: Registry, base: Settings, overrides: Settings) -> None:
        self.registry = registry
        self.problems: dict[str, None] = {}  # an ordered set, because two checks may find the same problem
        self.error: type[UsageError] = UsageError
        self.left: set[Key] = set()  # fields that a recipe leaves to the user, and that are missing
        self.chosen: list[Chosen] = []
        self.loaded: dict[Entry, type[Any]] = {}
        self.settings = merge(base, overrides)
        self.of_base = {key[:2] for key in base}
        self.missing = missing_defaults(registry, base, self.settings)
        named: Settings = {key: setting for key, setting in overrides.items() if key == ("model", "name")}
        preset = under_fine_tuning(self._preset(), base)
        self.settings = merge(merge(merge(base, named), preset), overrides)
        self.settings = without_missing(registry, base, self._with_presets_of_families(self.settings, ("model",)))
        self.tree = nested(self.settings)

    def run(self) -> RunConfig:
        malformed: set[str] = set()
        for section in self.tree:
            if section not in SECTIONS:
                self._problem((section,), f"unknown section{suggest(section, SECTIONS)} (sections: {listed(SECTIONS)})")
            elif not isinstance(self.tree[section], dict | None):
                self._problem((section,), f"{NO_SECTION}, not {quoted(self.tree[section])}")
                malformed.add(section)
        readable = [section for section in SECTIONS if section not in malformed]
        recipe = self._recipe() if RECIPE in readable and RECIPE in self.tree else None
        named = {section: self._named(section) for section in NAMED_SECTIONS if section in readable}
        hosts = {
            section: self._bind((section,), model, self._raw(section))
            for section, model in HOST_SECTIONS.items()
            if section in readable
        }
        parallel, kernels = self._parallel(), self._kernels()
        frozen, of_optimizer = self._of_host("model").frozen, self._of_host("optimizer")
        self._precision()
        self._learning_rate()
        for section in FREE_SECTIONS:
            raw = self._named_in(section)
            self._sub_sections(section, list(raw), raw)
            if section == OF_LOSSES and len(raw) > 1:
                self._problem((section,), f"a run has one loss, and {listed(raw)} each compute one; keep one of them")
        if self.problems:
            raise self.error("\n".join(self.problems))
        config = RunConfig(
            **named,
            **hosts,
            parallel=parallel,
            kernels=kernels,
            chosen=tuple(self.chosen),
            settings=self.settings,
            frozen=frozen,
            recipe=recipe,
            groups=of_optimizer.groups,
            average=of_optimizer.average,
            offload=of_optimizer.offload,
        )
        found = provided("hints", self.registry)
        if found is not None and (problems := [*found.contradictions(config, RATES.load(config.schedule.name))]):
            raise UsageError("\n".join(problems))
        return config

    def _raw(self, section: str) -> dict[str, Any]:
        fields = self.tree.get(section)
        return dict(fields) if isinstance(fields, dict) else {}

    def _named_in(self, section: str) -> dict[str, Any]:
        """The sub-sections of a free section, without plugins whose value is `false`: the config omits them.

        Such a plugin is installed, or `base` names it.
        """
        raw, named = self._raw(section), dict[str, Any]()
        for name, value in raw.items():
            if value is not False:
                named[name] = value
            elif (section, name) not in self.of_base:
                self._plugin(section, name, (section, name))
        return named

    def _problem(self, key: Key, message: str, source: str | None = None) -> None:
        source = source or source_of(self.settings, key)
        self.problems[f"{brief('.'.join(key))}{f' ({source})' if source else ''}: {message}"] = None

    def _plugin(self, kind: str, word: Any, key: Key) -> Entry | None:
        if key[0] in self.missing and key[1:] == ("name",):
            self.problems[missing_message(self.registry, self.missing)] = None
            return None
        try:
            entry = self.registry.find(kind, str(word))
            if entry not in self.loaded:
                self.loaded[entry] = self.registry.load(entry)
            return entry
        except UsageError as error:
            if isinstance(error, BrokenPlugin):
                self.error = BrokenPlugin
            self._problem(key, f"{error}{_path_hint(key, str(word))}{self._omission_hint(key)}")
            return None

    def _omission_hint(self, key: Key) -> str:
        """The remedy if a plugin that the default run or a saved run names is missing or broken."""
        is_default = key[0] in FREE_SECTIONS and key in self.of_base
        return f"; to run without it, use --set {'.'.join(key)}=false" if is_default else ""

    def _preset(self) -> Settings:
        """The settings of the preset that the config names; empty if it names none."""
        name, preset = (self.settings.get(("model", field)) for field in ("name", "preset"))
        if preset is None or preset.value is None or name is None:
            return {}
        entry = self._plugin("models", name.value, ("model", "name"))
        if entry is None:
            return {}
        try:
            preset_of(self.loaded[entry], name.value, str(preset.value))
        except ValueError as error:
            self._problem(("model", "preset"), str(error))
            return {}
        return from_mapping(self.loaded[entry].presets[str(preset.value)], f"preset {preset.value}")

    def _with_presets_of_families(self, settings: Settings, section: Key) -> Settings:
        """The settings with the presets of the families inside of the model; `bind` reports names that do not exist."""
        name, preset = (settings.get((*section, field)) for field in ("name", "preset"))
        if name is None:
            return settings
        try:
            plugin = self.registry.load(self.registry.find("models", str(name.value)))
        except UsageError:  # binding reports it
            return settings
        if len(section) > 1 and preset is not None and str(preset.value) in getattr(plugin, "presets", {}):
            fields = preset_of(plugin, name.value, str(preset.value))
            own = {key: setting for key, setting in settings.items() if key != (*section, "preset")}
            settings = merge(from_mapping(fields, f"preset {preset.value}", section), own)
        for field in family_fields(plugin.Config):
            settings = self._with_presets_of_families(settings, (*section, field))
        return settings

    def _named(self, section: str) -> Any:
        raw = self._raw(section)
        word, kind = raw.pop("name", None), KIND_OF_SECTION[section]
        if section == "model":
            raw.pop("preset", None)  # `_preset` has merged its settings
        if not word:
            self._problem(
                (section, "name"), f"is required: the name of a plugin (installed: {listed(self.registry.names(kind))})"
            )
            return None
        entry = self._plugin(kind, word, (section, "name"))
        for field in host_fields(section, self.loaded[entry]) if entry else ():
            raw.pop(field, None)
        return self._choose(entry, (section,), raw) if entry else None

    def _of_host(self, section: str) -> Any:
        """The host's own fields in the section of a plugin."""
        raw, model = self._raw(section), HOST_FIELDS[section]
        entry = self._plugin(KIND_OF_SECTION[section], raw["name"], (section, "name")) if raw.get("name") else None
        names = host_fields(section, self.loaded[entry]) if entry else ()
        return self._bind((section,), model, {name: raw[name] for name in names if name in raw}) or model()

    def _choose(self, entry: Entry, key: Key, raw: dict[str, Any]) -> Any:
        chosen = self._bound(entry, key, raw)
        self.chosen.append(chosen)
        return chosen.config

    def _bound(self, entry: Entry, key: Key, raw: dict[str, Any]) -> Chosen:
        plugin = self.loaded[entry]
        return Chosen(entry, plugin, self._bind(key, plugin.Config, raw), key)

    def _bind(self, key: Key, model: type[BaseModel], raw: dict[str, Any]) -> Any:
        config, problems = bind(model, raw, self.registry)
        for problem in problems:
            if problem.is_fault:
                self.error = BrokenPlugin
            place = (*key, *problem.path)
            if place in self.left or (key[0] == "model" and ("checkpoint", "pretrained") in self.left):
                continue
            is_open = problem.message.startswith("is required") and "--set " not in problem.message
            remedy = f"; set it with {'.'.join(place)}=VALUE" if is_open else ""
            self._problem(place, f"{problem.message}{remedy}", self._sources_of_fields(place, problem.message))
        return config

    def _sources_of_fields(self, key: Key, message: str) -> str:
        """The sources of the fields of a section that a message about the section mentions."""
        section: Any = self.tree
        for name in key:
            section = section.get(name) if isinstance(section, dict) else None
        fields = section if isinstance(section, dict) else {}
        mentioned = [field for field in fields if re.search(rf"\b{re.escape(field)}\b", message)]
        return ", ".join(dict.fromkeys(source_of(self.settings, (*key, field)) or "" for field in mentioned))

    def _parallel(self) -> Parallel:
        raw = self._raw("parallel")
        word, data = str(raw.pop("layout", None) or ""), raw.pop("data", None)
        flags = {name: raw.pop(name, False) for name in ("balance", "read_once")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                self._problem(("parallel", name), f"must be true or false, not {quoted(flag)}")
        names = self.registry.names("parallel")
        degrees: dict[str, int] = {}
        try:
            degrees = parse_layout(word, names)
        except UsageError as error:
            self._problem(("parallel", "layout"), str(error))
        rest = self._plugin("parallel", data, ("parallel", "data")) if data is not None else None
        replicated = None
        if rest is not None and data not in degrees:
            key, own = self._sub_section("parallel", rest, data, raw)
            replicated = self._bound(rest, key, own)
        self._sub_sections("parallel", list(degrees), raw, bound=[replicated.section] if replicated else ())
        return Parallel(word, degrees, data, replicated, **{name: flag is True for name, flag in flags.items()})

    def _kernels(self) -> Kernels:
        raw, kinds = self._raw("kernels"), self.registry.slot_kinds()
        fields = (*kinds, "default")
        default = raw.pop("default", None)
        words = {kind: raw.pop(kind) for kind in list(raw) if kind in fields or self._may_be_kind(kind, raw, fields)}
        words["default"] = None if isinstance(default, list) else default
        entries = {kind: word and self._plugin("kernels", word, ("kernels", kind)) for kind, word in words.items()}
        several = default if isinstance(default, list) else []
        found = [(word, self._plugin("kernels", word, ("kernels", "default"))) for word in several]
        chosen = dict.fromkeys(str(words[kind]) for kind, entry in entries.items() if entry)
        chosen |= dict.fromkeys(str(word) for word, entry in found if entry)
        self._sub_sections("kernels", chosen, raw, fields)
        labels = {kind: entry.label if entry else None for kind, entry in entries.items()}
        only, rivals = labels.pop("default"), tuple(dict.fromkeys(entry.label for _, entry in found if entry))
        return Kernels(labels, rivals[0]) if len(rivals) == 1 else Kernels(labels, only, rivals)

    def _may_be_kind(self, word: str, raw: dict[str, Any], fields: Iterable[str]) -> bool:
        """Whether a field of 'kernels' may name a kind of slots that only the blocks of the model declare.

        The host checks it when the model is built. A word that resembles a published kind or a plugin is a mistake.
        """
        plugins = [name for e in self.registry.entries("kernels") for name in (e.name, f"{e.distribution}/{e.name}")]
        is_choice = isinstance(raw[word], str | None) and word not in plugins
        return is_choice and word.isidentifier() and not suggest(word, [*fields, *plugins])

    def _precision(self) -> None:
        """Choose the precision that `trainer.precision` names, with its options."""
        word, section = self._raw("trainer").get("precision"), OPTIONS_OF_PRECISIONS
        named = [word] if isinstance(word, str) and word else []
        found = [name for name in named if self._plugin(section, name, ("trainer", "precision"))]
        self._sub_sections(section, found, self._raw(section))

    def _learning_rate(self) -> None:
        """Refuse a learning rate schedule that is not in the open list, or that cannot be loaded."""
        word = self._raw("schedule").get("name")
        if isinstance(word, str) and word:
            try:
                RATES.load(word)
            except ValueError as error:
                self._problem(("schedule", "name"), str(error))
            except (ImportError, AttributeError) as error:
                self._problem(("schedule", "name"), f"the learning rate schedule '{word}' cannot be loaded: {error}")

    def _recipe(self) -> sections.Recipe | None:
        """The section 'recipe'. Each field that it leaves to the user, and the user does not set, is a problem."""
        recipe: sections.Recipe | None = self._bind((RECIPE,), sections.Recipe, self._raw(RECIPE))
        for field, what in recipe.give.items() if recipe else ():
            key = tuple(field.split("."))
            given = [one for other, one in self.settings.items() if other[: len(key)] == key and one.value is not None]
            if all(map(is_default, given)):
                source = source_of(self.settings, (RECIPE, "give", field))
                self._problem(key, f"the recipe leaves this field to you: {what}", source)
                self.left.add(key)
        return recipe

    def _sub_sections(
        self,
        section: str,
        words: Iterable[str],
        raw: dict[str, Any],
        fields: Iterable[str] = (),
        bound: Iterable[Key] = (),
    ) -> None:
        """Bind `section.NAME` for every chosen plugin, and check the sections of installed plugins that are not chosen.

        `bound` lists the keys of sections that are bound already.
        """
        self._refuse_two_names(section, raw)
        for word in words:
            entry = self._plugin(section, word, (section, word))
            if entry and not self._is_chosen(entry, (section, word)):
                self._choose(entry, *self._sub_section(section, entry, word, raw))
        installed = {name for e in self.registry.entries(section) for name in (e.name, f"{e.distribution}/{e.name}")}
        done = {*bound, *(chosen.section for chosen in self.chosen)}
        for name in raw:
            if name not in installed and section not in FREE_SECTIONS:
                plugins = {e.name for e in self.registry.entries(section)}
                self._problem((section, name), _unknown(name, fields, plugins, [*fields, *installed]))
            elif name in installed and (section, name) not in done:
                entry = self._plugin(section, name, (section, name))
                if entry:
                    self._bound(entry, *self._sub_section(section, entry, name, raw))

    def _refuse_two_names(self, section: str, raw: dict[str, Any]) -> None:
        """Note a problem for a plugin with two sub-sections: its name, and its name after that of its distribution."""
        entries = self.registry.entries(section)
        names = [entry.name for entry in entries]
        for entry in entries:
            full = f"{entry.distribution}/{entry.name}"
            if names.count(entry.name) == 1 and entry.name in raw and full in raw:
                self._problem((section, full), f"is the plugin '{entry.name}', which the config also names; keep one")

    def _sub_section(self, section: str, entry: Entry, word: str, raw: dict[str, Any]) -> tuple[Key, dict[str, Any]]:
        """(key, fields) of the sub-section of a plugin that the config names by `word`."""
        name = word if word in raw else entry.name
        own = raw.get(name)
        if isinstance(own, dict | None):
            return (section, name), dict(own or {})
        self._problem(
            (section, name),
            f"{NO_SECTION}, not {quoted(own)}{self._remedy(section, name, own)}",
        )
        return (section, name), {}

    def _remedy(self, section: str, name: str, own: Any) -> str:
        """The remedy if the user wrote true in the place of a section, or a degree in that of a strategy's."""
        if own is True:
            return f"; for the plugin with its defaults, set {section}.{name}={{}}"
        if section != "parallel" or isinstance(own, bool) or not isinstance(own, int) or own < 1:
            return ""
        layout = str(self._raw("parallel").get("layout") or "")
        return "" if name in layout else f"; to set the degree, use --parallel {layout}{name}{own}"

    def _is_chosen(self, entry: Entry, key: Key) -> bool:
        """Whether a plugin with this label is chosen already; if it is from another distribution, that is a problem."""
        other = next((chosen.entry for chosen in self.chosen if chosen.label == entry.label), None)
        if other is not None and other != entry:
            self._problem(key, f"{other.origin} and {entry.origin} both provide {entry.label}; use only one of them")
        return other is not None


def _unknown(name: str, fields: Iterable[str], plugins: Iterable[str], words: Iterable[str]) -> str:
    """The message about a key of a section that is neither a field nor the section of an installed plugin."""
    if similar := suggest(name, words):
        return f"unknown field or plugin{similar}"
    of_fields = f"fields: {listed(sorted(fields))}; " if set(fields) else ""
    return (
        f"unknown field or plugin ({of_fields}installed plugins: {listed(sorted(plugins))}); remove it, or install the "
        f"package that supplies the plugin '{name}'"
    )


def _path_hint(key: Key, word: str) -> str:
    """The remedy if the user wrote a path in the place of a data plugin's name."""
    is_path = key == ("data", "name") and len(word) < 200 and "\n" not in word and ("/" in word or "." in word)
    return f"; to train on the file or folder '{word}', use --set data.path={word}" if is_path else ""
