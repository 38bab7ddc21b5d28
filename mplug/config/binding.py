"""The config of a run, as data, which `mplug.registry.resolve` makes: all settings, bound to sections."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mplug.config import host_sections as sections
from mplug.config.entry import Entry
from mplug.config.family import contained_in
from mplug.config.sources import NAMED_SECTIONS, RECIPE, Key, Settings, from_mapping, merge, nested, source_of

KIND_OF_SECTION = {"model": "models", "optimizer": "optimizers", "data": "data"}
HOST_SECTIONS: dict[str, type[sections.Section]] = {
    "trainer": sections.Trainer,
    "schedule": sections.Schedule,
    "checkpoint": sections.Checkpoint,
}
OF_LOSSES = "objectives"
"""The section of the plugin that computes the loss, if it is not the model's own: at most one."""
FREE_SECTIONS = ("memory", "adapters", OF_LOSSES, "extensions")
"""Sections that choose any number of plugins.

A sub-section with the name of a plugin chooses this plugin. The value `false` removes the choice of a lower source.
"""
OPTIONS_OF_PRECISIONS = "precisions"
"""The section with the options of precisions, each in a sub-section; `trainer.precision` chooses one of them."""
PLUGIN_SECTIONS = ("parallel", "kernels", OPTIONS_OF_PRECISIONS, *FREE_SECTIONS)
HOST_FIELDS: dict[str, type[sections.Section]] = {"model": sections.Model, "optimizer": sections.Optimizer}
"""The host's own fields in the section of a plugin. A plugin's field of the same name keeps its own meaning."""
OPTIONAL_SECTIONS = (OPTIONS_OF_PRECISIONS, *FREE_SECTIONS, RECIPE)
"""Sections that a config of a run may omit."""
SECTIONS = (*NAMED_SECTIONS, *PLUGIN_SECTIONS, *HOST_SECTIONS, RECIPE)


def host_fields(section: str, plugin: type[Any]) -> dict[str, Any]:
    """The host's own fields (pydantic's) in the section of a plugin."""
    fields = HOST_FIELDS[section].model_fields if section in HOST_FIELDS else {}
    return {name: field for name, field in fields.items() if name not in plugin.Config.model_fields}


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

    @property
    def sums_for_others(self) -> bool:
        """Whether this strategy with one rank sums the gradients of axes that divide samples ."""
        return getattr(self.plugin, "sums_for_others", False) is True


@dataclass(frozen=True)
class Parallel:
    """The layout: each named strategy's degree, and the strategy `data` that takes the remaining ranks.

    `rest` is the strategy `data` with its bound config; None if the layout names that strategy, or if `data` is None.
    `balance` says that ranks which read different samples share the rows of their streams (`mplug.Stream`), and that
    packed samples are divided over ranks and micro batches by the FLOPs of their documents. `read_once` says that one
    of the ranks that compute with the same samples reads them, and sends them to the others.
    """

    layout: str
    degrees: Mapping[str, int]
    data: str | None
    rest: Chosen | None = None
    balance: bool = False
    read_once: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernel plugin that the config names for each kind of slot (labels such as 'kernels/NAME').

    `default` fills every slot that it supports and whose kind is not in `kinds`. A kind with the value None keeps the
    composition in plain torch. If the config names several default kernels, `default` is None and `rivals` lists them:
    the fastest one that serves a slot fills it.
    """

    kinds: Mapping[str, str | None]
    default: str | None
    rivals: tuple[str, ...] = ()

    @property
    def defaults(self) -> tuple[str, ...]:
        """The labels of the default kernels."""
        return self.rivals if self.default is None else (self.default,)

    @property
    def plugins(self) -> frozenset[str]:
        """The labels of all kernel plugins of the run."""
        return frozenset(label for label in (*self.defaults, *self.kinds.values()) if label is not None)

    def chosen(self, kind: str) -> str | None:
        """The label of the plugin for a kind of slot; None means the composition in plain torch."""
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
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained: the field `frozen` of the section 'model'."""
    recipe: sections.Recipe | None = None
    """The recipe from which settings come."""
    groups: tuple[sections.ParameterGroup, ...] = ()
    """Parameters with other rates or optimizers: the field `groups` of the section 'optimizer'."""
    average: sections.Average | None = None
    """The average of the weights: the field `average` of the section 'optimizer'."""
    offload: sections.Offload | None = None
    """Where optimizer states are: the field `offload` of the section 'optimizer'."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The plugins of the run: those that the config names, each before the families that it contains."""
        found: dict[Entry, None] = {}
        for chosen in self.chosen:
            found |= dict.fromkeys((chosen.entry, *(family.entry for _, family in contained_in(chosen.config))))
        found |= dict.fromkeys(group.optimizer.entry for group in self.groups if group.optimizer)
        return tuple(found)

    def with_rest(self, degree: int, source: str) -> "RunConfig":
        """The config whose layout also names the strategy of `parallel.data`, with the degree that `source` set."""
        parallel = self.parallel
        assert parallel.data is not None
        assert parallel.rest is not None
        layout = f"{parallel.layout}{parallel.data}{degree}"
        named = replace(parallel, layout=layout, degrees={**parallel.degrees, parallel.data: degree}, rest=None)
        settings = merge(self.settings, from_mapping(layout, source, ("parallel", "layout")))
        return replace(self, parallel=named, chosen=(*self.chosen, parallel.rest), settings=settings)

    def with_sums(self) -> "RunConfig":
        """The config in which the strategy of `parallel.data` takes part with one rank; the layout stays as written."""
        parallel = self.parallel
        assert parallel.data is not None
        assert parallel.rest is not None
        named = replace(parallel, degrees={**parallel.degrees, parallel.data: 1}, rest=None)
        return replace(self, parallel=named, chosen=(*self.chosen, parallel.rest))

    def resolved(self) -> dict[str, Any]:
        """Every value of the run as a plain nested mapping, including the plugins' defaults and presets."""
        tree: dict[str, Any] = {}
        for section in NAMED_SECTIONS:
            tree[section] = {"name": self.settings[section, "name"].value, **_plain(getattr(self, section))}
        tree["model"].setdefault("frozen", list(self.frozen))
        tree["optimizer"].setdefault("groups", [_plain(group) for group in self.groups])
        for name, value in (("average", self.average), ("offload", self.offload)):
            tree["optimizer"].setdefault(name, None if value is None else _plain(value))
        raw = nested(self.settings)
        for section in PLUGIN_SECTIONS:
            tree[section] = dict(raw.get(section, {}))
        for chosen in self.chosen:
            if len(chosen.section) == 2:
                tree[chosen.section[0]][chosen.section[1]] = _plain(chosen.config)
        tree |= {section: _plain(getattr(self, section)) for section in HOST_SECTIONS}
        if self.recipe is not None and self.recipe.name is not None:
            tree[RECIPE] = {"name": self.recipe.name, "origin": self.recipe.origin}
        return {section: tree[section] for section in SECTIONS if section in tree}

    def sources(self) -> dict[str, str]:
        """The source of every value of `resolved()`; the source of a plugin's default names the plugin."""
        owners: dict[Key, str] = {("checkpoint", "pretrained"): "default of mplug"}
        for chosen in self.chosen:
            owners |= dict.fromkeys(
                ((*chosen.section, name) for name in host_fields(chosen.section[0], chosen.plugin)), "default of mplug"
            )
            inside = {(*chosen.section, *steps): family.label for steps, family in contained_in(chosen.config)}
            owners |= {key: f"default of {label}" for key, label in (inside | {chosen.section: chosen.label}).items()}
        found = {}
        for key in from_mapping(self.resolved(), ""):
            set_here = {other: setting for other, setting in self.settings.items() if other[: len(key)] == key}
            owner = next((owner for section, owner in owners.items() if key[: len(section)] == section), "")
            found[".".join(key)] = (source_of(set_here, key) or "") if set_here else owner
        return found


def _plain(config: Any) -> Any:
    return config.model_dump(mode="json")
