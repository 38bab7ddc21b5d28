"""Entry points -> names -> plugins. Listing reads distribution metadata only and never imports a plugin."""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

from mplug.config.entry import Entry
from mplug.errors import UsageError, listed, suggest
from mplug.registry.installed import (
    HOST_DISTRIBUTION,
    Described,
    Installed,
    Metadata,
    Point,
    State,
    described,
    described_on_path,
    folders_of_path,
    state_of_path,
)
from mplug.registry.made_plugin import MadePlugin
from mplug.system.version import __version__

KINDS = (
    "models",
    "parallel",
    "kernels",
    "optimizers",
    "precisions",
    "data",
    "tokenizers",
    "formats",
    "memory",
    "adapters",
    "objectives",
    "extensions",
    "commands",
)
FLAGS = "flags"
"""The group 'mplug.flags', whose entry points are not plugins: each maps a flag to the config field that it sets."""
ARCHITECTURES = "architectures"
"""The group 'mplug.architectures': each maps the public name of an architecture to the name of its model family."""
FORMAT_FILES = "format_files"
"""The group 'mplug.format_files': each maps the name of a file to the name of the format of folders that have it."""
TOKENIZER_FILES = "tokenizer_files"
"""The group 'mplug.tokenizer_files': each maps the name of a file to the name of the tokenizer that reads it."""
OPEN_LISTS = "open_lists"
"""The group 'mplug.open_lists': each entry opens a list, whose group is 'mplug.' and its name (`mplug.OpenList`).

The entry points of a list's group are not plugins: each adds an entry to the list.
"""
SUGGESTIONS = "suggestions"
"""The group 'mplug.suggestions': functions from a finished run to a clause that says what to do with it, or to ''."""
RECIPES = "recipes"
"""The group 'mplug.recipes': each maps the name of a recipe to the package with its file, NAME.yaml."""
SLOTS = "slots"
"""The group 'mplug.slots', by which a distribution publishes the slots of its blocks: each maps a slot to its kind."""
PROVIDED = (
    *("adaptations", "assemblers", "balancers", "beginnings", "compilers", "divisions", "faults"),
    *("hints", "invariances", "launchers", "preflights", "products", "progress"),
    *("recipe_settings", "recorders", "relayouts", "savers", "save_times", "shardings"),
    *("steps", "stores", "token_offers", "updates", "validations"),
)
"""The groups of classes that serve the host; a run asks one class of a group (docs/architecture.md)."""
OTHER_GROUPS = (FLAGS, ARCHITECTURES, FORMAT_FILES, TOKENIZER_FILES, OPEN_LISTS, SUGGESTIONS, RECIPES, SLOTS)
GROUPS = (*KINDS, *OTHER_GROUPS, *PROVIDED)
"""The groups that exist without any other distribution, without 'mplug.'."""
RESERVED_FIELDS = ("name", "preset")
RESERVED_NAMES = {"kernels": ("default",), "parallel": ("layout", "data", "balance", "read_once")}
"""By kind, the names that no plugin may have: the host has fields with these names beside the plugins' sub-sections.

Kernels cannot have the name of a published kind of slots either.
"""


NATIVE = "Part of mplug: weights and activations in a format of torch, without a recipe"
"""The summary of the host's precisions."""
HOST_KINDS = ("precisions",)
"""The kinds of the host's own plugins."""
NEEDED_HOOKS = {"precisions": "define_precision", "objectives": "adapt_model"}
"""By kind, the hook that every plugin of this kind implements."""


class BrokenPlugin(UsageError):
    """A plugin that the user named cannot be used: its import fails, or it breaks the contract."""


@dataclass(frozen=True)
class Shadowed:
    """Metadata of a distribution that has no effect, because another copy comes earlier on the path."""

    distribution: str
    version: str
    source: str


@dataclass(frozen=True)
class Misplaced:
    """An entry point without effect: the name of its group starts with 'mplug.', but mplug has no such group.

    `groups` are those that mplug and the installed distributions have, without 'mplug.'.
    """

    group: str
    name: str
    distribution: str
    version: str
    groups: tuple[str, ...]

    def __str__(self) -> str:
        groups = [f"mplug.{kind}" for kind in self.groups]
        return (
            f"the entry point '{self.name}' of {self.distribution} {self.version} is in the group '{self.group}', "
            f"which mplug {__version__} does not have{suggest(self.group, groups)}"
        )


class Registry:
    """The plugins installed for this interpreter, as they are when the registry is first asked."""

    def __init__(self, installed: Iterable[Installed] | None = None) -> None:
        self._installed = installed

    @staticmethod
    def of_process() -> "Registry":
        """The registry that all parts of a run share: one as long as `sys.path` names the same folders.

        What is installed into one of them later is for later processes; a new `Registry()` sees it.
        """
        return registry_along(*folders_of_path())

    @cached_property
    def _scan(self) -> "Scan":
        if self._installed is not None:
            return _scan(described(self._installed))
        return _scan_of_path(*state_of_path())

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Installed plugins of a kind (of all kinds if None), sorted by kind and name."""
        return [entry for entry in self._scan[0] if kind == entry.kind or (kind is None and entry.kind in KINDS)]

    def flags(self) -> list[Entry]:
        """Short flags that installed distributions add to the command line; `target` is the field that each sets."""
        return [entry for entry in self._scan[0] if entry.kind == FLAGS]

    def table(self, group: str) -> list[Entry]:
        """The entries of a group that is no kind of plugins: looking up `name` gives `target`."""
        return [entry for entry in self._scan[0] if entry.kind == group]

    def lists(self) -> list[str]:
        """The groups of the open lists of installed distributions, without 'mplug.'."""
        return sorted({entry.name for entry in self.table(OPEN_LISTS)})

    def slot_kinds(self) -> list[str]:
        """The kinds of the slots that installed distributions publish: fields of the section 'kernels'."""
        return list(dict.fromkeys(entry.target for entry in self.table(SLOTS)))

    def name_fault(self, kind: str, name: str) -> str:
        """Why no plugin of a kind can have a name; the empty string if one can."""
        reserved = RESERVED_NAMES.get(kind, ())
        if name not in (*reserved, *(self.slot_kinds() if kind == "kernels" else ())):
            return ""
        field = f"a field of the host ('{kind}.{name}')"
        return f"no plugin of kind '{kind}' can be named '{name}', {field}; rename the plugin"

    def shadowed(self) -> list[Shadowed]:
        """Copies of plugins' metadata that have no effect."""
        return self._scan[1]

    def misplaced(self) -> list[Misplaced]:
        """Entry points in groups that mplug does not have."""
        return self._scan[2]

    def names(self, kind: str) -> list[str]:
        """The names that a user can type for a kind; 'DISTRIBUTION/NAME' if several distributions claim a name."""
        claims = [entry.name for entry in self.entries(kind)]
        return [
            entry.name if claims.count(entry.name) == 1 else f"{entry.distribution}/{entry.name}"
            for entry in self.entries(kind)
        ]

    def find(self, kind: str, word: str) -> Entry:
        """The plugin of a kind that the user named: 'gpt', or 'acme-gpt/gpt' if two distributions claim 'gpt'.

        Raises UsageError if no plugin or several plugins match.
        """
        distribution, _, name = word.rpartition("/")
        claims = [
            entry for entry in self.entries(kind) if entry.name == name and distribution in ("", entry.distribution)
        ]
        if len(claims) > 1:
            choices = [f"'{entry.distribution}/{name}'" for entry in claims]
            raise UsageError(
                f"'{name}' is claimed by {listed(entry.origin for entry in claims)}; use {' or '.join(choices)}"
            )
        if not claims:
            names = self.names(kind)
            missing = f"no plugin '{word}' of kind '{kind}' is installed"
            if misplaced := [point for point in self.misplaced() if point.name == name]:
                raise UsageError(f"{missing}: {misplaced[0]}")
            raise UsageError(f"{missing}{suggest(word, names)} (installed: {listed(names)}){self._stale(kind)}")
        return claims[0]

    def _stale(self, kind: str) -> str:
        """The remedy if the installed metadata of the host are older than its code."""
        is_stale = kind in HOST_KINDS and not any(one.distribution == HOST_DISTRIBUTION for one in self.entries(kind))
        return "; the installed metadata of mplug lacks the host's own plugins: install mplug again" if is_stale else ""

    def load(self, entry: Entry) -> type[Any]:
        """Import a plugin's class and check it against the contract. Raises BrokenPlugin with the reason."""
        from mplug.registry.hooks import faults  # pluggy is not needed to list plugins

        refuse_other_versions(entry)
        module, _, attribute = entry.target.partition(":")
        try:
            plugin = getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:  # a plugin that calls exit() must not look like a completed run
            raise BrokenPlugin(f"{entry.label} ({entry.origin}) cannot be imported:\n{_trace(error)}") from error
        if isinstance(plugin, MadePlugin):
            plugin = plugin.plugin
        if not isinstance(plugin, type):
            raise BrokenPlugin(f"{entry.label} ({entry.origin}): '{entry.target}' is not a class")
        broken = [*filter(None, [self.name_fault(entry.kind, entry.name)]), *faults(plugin), *_config_faults(plugin)]
        broken += _missing_hook(entry.kind, plugin)
        if broken:
            raise BrokenPlugin(f"{entry.label} ({entry.origin}) breaks the plugin contract: {'; '.join(broken)}")
        return plugin


def refuse_other_versions(entry: Entry) -> None:
    """Raise BrokenPlugin if the plugin's 'Requires-Dist: mplug' does not admit this host."""
    if entry.requires is not None and not _admits(entry.requires, __version__):
        raise BrokenPlugin(
            f"{entry.label} ({entry.origin}) requires mplug {entry.requires}, but mplug {__version__} is installed; "
            f"install another release of {entry.distribution} or of mplug"
        )


COMPARED = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
PLAIN = re.compile(r"(>=|<|==)(\d+(?:\.\d+)*)")
"""A bound of a requirement, as bundled plugins have them."""


def _admits(requirement: str, version: str) -> bool:
    """Whether a requirement admits a version; bounds of plain numbers need no library, whose import takes long."""
    bounds = [PLAIN.fullmatch(clause.strip()) for clause in requirement.split(",")]
    if not all(bounds) or not re.fullmatch(r"\d+(\.\d+)*", version):
        from packaging.specifiers import SpecifierSet

        return version in SpecifierSet(requirement, prereleases=True)
    own = _numbers(version)
    return all(COMPARED[one[1]](own, _numbers(one[2])) for one in bounds if one)


def _numbers(version: str) -> list[int]:
    """The numbers of a version without zeros at its end: 1.0 equals 1."""
    numbers = [int(number) for number in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


@lru_cache(maxsize=1)
def registry_along(*folders: str) -> Registry:  # the folders are the key
    """The registry of a process whose `sys.path` has these folders; `registry_along.cache_clear()` forgets it."""
    return Registry()


Scan = tuple[list[Entry], list[Shadowed], list[Misplaced]]


@lru_cache(maxsize=1)
def _scan_of_path(*state: tuple[str, State]) -> Scan:  # the state is the key
    """The scan of what is installed; a command asks for it several times, and it takes most of the time of listing."""
    return _scan(described_on_path())


def _scan(installed: Iterable[Described]) -> Scan:
    shadowed: list[Shadowed] = []
    seen: dict[str, tuple[Metadata, list[Point]]] = {}
    for metadata, points in installed:
        own = [point for point in points if point.group.startswith("mplug.")]
        if not own:
            continue
        normalized = re.sub(r"[-_.]+", "-", metadata.name).lower()
        if normalized in seen:
            shadowed.append(Shadowed(metadata.name, metadata.version, metadata.source))
            continue
        seen[normalized] = (metadata, own)
    opened = {one.name for _, points in seen.values() for one in points if one.group == f"mplug.{OPEN_LISTS}"}
    groups = (*GROUPS, *sorted(opened))
    entries: list[Entry] = []
    misplaced: list[Misplaced] = []
    for metadata, own in seen.values():
        for point in own:
            kind = point.group.removeprefix("mplug.")
            if kind in groups:
                entries.append(_entry(kind, point, metadata))
            else:
                misplaced.append(Misplaced(point.group, point.name, metadata.name, metadata.version, groups))
    return sorted(entries, key=lambda entry: (entry.kind, entry.name, entry.distribution)), shadowed, misplaced


def _entry(kind: str, point: Point, of: Metadata) -> Entry:
    """An entry point; the summary of the host describes mplug as a whole, and not its precisions."""
    summary = NATIVE if of.name == HOST_DISTRIBUTION and kind == "precisions" else of.summary
    return Entry(kind, point.name, point.value, of.name, of.version, summary, of.requires, of.source)


def _config_faults(plugin: type[Any]) -> list[str]:
    fields = getattr(getattr(plugin, "Config", None), "model_fields", None)
    if fields is None:
        return ["it has no inner class 'Config' that is a pydantic model"]
    broken = [
        f"its Config has a field '{name}', which is reserved for the host" for name in RESERVED_FIELDS if name in fields
    ]
    if plugin.Config.model_config.get("extra") != "forbid":
        broken.append("its Config does not forbid unknown fields (set extra='forbid')")
    broken += [
        f"the field '{name}' of its Config has no description" for name, f in fields.items() if not f.description
    ]
    return broken


def _missing_hook(kind: str, plugin: type[Any]) -> list[str]:
    """The fault of a plugin without the hook by which plugins of its kind act."""
    hook = NEEDED_HOOKS.get(kind)
    return [f"it does not implement the hook '{hook}'"] if hook and not hasattr(plugin, hook) else []


def _trace(error: BaseException) -> str:
    import traceback  # only a plugin that cannot be imported needs it

    return "".join(traceback.format_exception(error)).rstrip()
