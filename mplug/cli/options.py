"""Options that several commands share, and their conversion to settings of the config."""

import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mplug.cli.setting_option import SettingOption
from mplug.config.entry import Entry
from mplug.errors import UsageError, brief
from mplug.registry.entry_points import RECIPES, Registry
from mplug.registry.stores import is_address, local_path

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.config.sources import Settings

F = TypeVar("F", bound=Callable[..., Any])


class PluginName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of an installed plugin. The shell completes it from metadata, without importing a plugin."""

    name = "name"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed names that begin with `incomplete`."""
        registry = Registry.of_process()
        entries = {entry.name: entry.summary for entry in registry.entries(self.kind)}
        names = [name for name in registry.names(self.kind) if name.startswith(incomplete)]
        return [CompletionItem(name, help=entries.get(name)) for name in names]


class DataName(PluginName):
    """The name of an installed data plugin, or a path. The shell completes paths where no name fits."""

    def __init__(self) -> None:
        super().__init__("data")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed names that begin with `incomplete`; if there is none, files."""
        return super().shell_complete(ctx, param, incomplete) or [CompletionItem(incomplete, type="file")]


class UserPath(click.Path):
    """A path. A '~' at its beginning is the user's home, also where the shell has not replaced it (`--config=~/x`)."""

    def __init__(self, **kinds: Any) -> None:
        super().__init__(path_type=Path, **kinds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        return super().convert(os.path.expanduser(value), param, ctx)


class StoredPath(UserPath):
    """A path, or the address of a store, whose copy on this machine the command receives."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if isinstance(value, str) and is_address(value) and not (ctx and ctx.resilient_parsing):
            value = str(local_path(value))
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A finite number within a range. Click's own FloatRange accepts NaN in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Fails if it is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class RunName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a run below `runs/`."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names of runs that begin with `incomplete`."""
        names = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@dataclass(frozen=True)
class Flag:
    """A short option of the host: the field that it sets, and its help."""

    field: str
    help: str
    type: click.ParamType | None = None  # type: ignore[type-arg]  # generic since click 8.4
    metavar: str | None = None
    multiple: bool = False

    def option(self, name: str) -> Callable[[F], F]:
        """The decorator that adds the option."""
        details: dict[str, Any] = {"type": self.type, "metavar": self.metavar, "multiple": self.multiple}
        return click.option(
            f"--{name.replace('_', '-')}", name, cls=SettingOption, field=self.field, help=self.help, **details
        )


FLAGS = {
    "model": Flag("model.name", "Model family (an installed plugin).", PluginName("models")),
    "preset": Flag("model.preset", "Preset of the model: nano, 125m, ...", metavar="NAME"),
    "parallel": Flag("parallel.layout", "Layout: strategies with their degrees, such as tp4pp2.", metavar="LAYOUT"),
    "kernels": Flag(
        "kernels.default",
        "Kernel plugin for every slot that it offers, or for one kind: norm=NAME (norm=null: plain torch). Of a list "
        "([NAME,NAME]), the fastest one that serves a slot.",
        metavar="NAME",
        multiple=True,
    ),
    "optimizer": Flag("optimizer.name", "Optimizer (an installed plugin).", PluginName("optimizers")),
    "data": Flag(
        "data.name",
        "Data loader (an installed plugin), or the path of the data, or both: --data NAME --data PATH.",
        DataName(),
        "NAME|PATH",
        multiple=True,
    ),
    "lr": Flag("optimizer.lr", "Learning rate after the warm-up.", metavar="NUMBER"),
    "steps": Flag("trainer.steps", "Last step of the run.", metavar="NUMBER"),
    "batch_size": Flag("trainer.global_batch_size", "Samples of a step, over all processes.", metavar="NUMBER"),
    "seq_length": Flag("trainer.seq_length", "Tokens of a sample.", metavar="NUMBER"),
    "seed": Flag("trainer.seed", "Seed of the initial weights and of the order of the data.", metavar="NUMBER"),
    "precision": Flag("trainer.precision", "Number formats (an installed precision): bf16.", PluginName("precisions")),
    "pretrained": Flag(
        "checkpoint.pretrained.path",
        "Start with these weights: a published folder (of an installed format), a checkpoint, or a run's folder.",
        metavar="PATH",
    ),
}
"""The host's short options, each with the field that it sets. A command's own option of the same name replaces one."""


def added_flags(reserved: Container[str] = ()) -> dict[str, Entry]:
    """Short flags that installed distributions add (the group 'mplug.flags'); `target` is the field that each sets.

    Flags in `reserved`, and flags that two distributions claim, are left out, so that they do not disturb other runs.
    """
    claims: dict[str, list[Entry]] = {}
    for entry in Registry.of_process().flags():
        claims.setdefault(entry.name, []).append(entry)
    unique = {name.replace("-", "_"): entries[0] for name, entries in claims.items() if len(entries) == 1}
    return {name: entry for name, entry in unique.items() if name not in reserved}


def config_options(function: F) -> F:
    """Decorate a command with the options that choose and change a run's config.

    Unless the command has an argument of its own, it also takes assignments and a config file without an option.
    """
    own = getattr(function, "__click_params__", ())
    of_command = {parameter.name for parameter in own}
    options = [flag.option(name) for name, flag in FLAGS.items() if name not in of_command]
    for name, entry in added_flags({*HOST_NAMES, *of_command}).items():
        text = f"Set {entry.target} (from {entry.distribution})."
        value: dict[str, Any] = {"metavar": "VALUE"}
        if entry.target.startswith(KERNELS):
            text = f"Kernel plugin for {entry.target.removeprefix(KERNELS)} (from {entry.distribution})."
            value = {"type": PluginName("kernels")}
        options.append(click.option(f"--{entry.name}", name, help=text, **value))
    options += OTHER_OPTIONS
    if not any(isinstance(parameter, click.Argument) for parameter in own):
        options.append(click.argument("words", nargs=-1, metavar="[FILE.yaml] [FIELD=VALUE]..."))
    for option in reversed(options):
        function = option(function)
    return function


OTHER_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--adapt",
        type=PluginName("adapters"),
        multiple=True,
        help="Train adapters instead of the model's weights (an installed adapter plugin).",
    ),
    click.option(
        "--objective",
        type=PluginName("objectives"),
        help="Train by another loss than the model's own (an installed objective plugin).",
    ),
    click.option(
        "--recipe",
        type=PluginName(RECIPES),
        help="Settings of an installed recipe ('mplug recipes list'); --config and other options change them.",
    ),
    click.option("--config", "file", type=UserPath(), help="YAML file with settings; FILE.yaml alone names it too."),
    click.option(
        "--set",
        "assignments",
        metavar="FIELD=VALUE",
        multiple=True,
        help="Set any field: trainer.steps=100. The last value of a field stands.",
    ),
]
"""The host's options of `config_options` beside `FLAGS`."""
KERNELS = "kernels."
"""The section of the config whose fields name the supplier of a kind of slots."""
HOST_NAMES = (*FLAGS, "adapt", "objective", "recipe", "file", "assignments", "config", "set", "words")
"""Names that a plugin's flag must not have."""


def overrides(
    *,
    file: Path | None,
    assignments: tuple[str, ...],
    kernels: tuple[str, ...],
    data: tuple[str, ...] = (),
    adapt: tuple[str, ...] = (),
    objective: str | None = None,
    recipe: str | None = None,
    words: tuple[str, ...] = (),
    **flags: str | None,
) -> "Settings":
    """The settings of the command line, over those of the file that `--config` names, over those of the recipe."""
    from mplug.cli.hints import assignment_hint  # completion and help need neither
    from mplug.cli.words import read_words
    from mplug.config.sources import merge, read_assignments, read_file
    from mplug.registry.provided import needed

    given = read_words(words, file, assignments)
    assignment_hint(assignments)
    settings: Settings = read_file(given.file) if given.file else {}
    if recipe is not None:
        found = needed("recipe_settings", "--recipe", "mplug-settings")
        settings = found.under(settings, Registry.of_process(), recipe)
    fields = {name: entry.target for name, entry in added_flags().items()}
    fields |= {name: flag.field for name, flag in FLAGS.items()}
    settings = merge(settings, _of_data(data))
    for flag, value in flags.items():
        if value is not None:
            settings = merge(settings, read_assignments([f"{fields[flag]}={value}"], f"--{flag.replace('_', '-')}"))
    suppliers = [value.rpartition("=") for value in kernels]
    by_kind = {
        field.removeprefix(KERNELS): flag
        for flag, field in fields.items()
        if field.startswith(KERNELS) and flag not in FLAGS
    }
    by_flag = [kind for kind, flag in by_kind.items() if flags.get(flag) is not None]
    _refuse_repeated([_kernel_option(kind, by_kind) for kind in (*by_flag, *(kind for kind, _, _ in suppliers))])
    _refuse_repeated([f"--adapt {name}" for name in adapt])
    for kind, _, name in suppliers:
        settings = merge(settings, read_assignments([f"kernels.{kind or 'default'}={name}"], "--kernels"))
    for name in adapt:
        settings = merge(settings, read_assignments([f"adapters.{name}={{}}"], "--adapt"))
    if objective is not None:
        settings = merge(settings, read_assignments([f"objectives.{objective}={{}}"], "--objective"))
    return merge(merge(settings, read_assignments(assignments)), given.settings)


def _of_data(words: tuple[str, ...]) -> "Settings":
    """The settings of --data: the name of a plugin, a path, or both.

    A word that no plugin has is a path if it looks like one, or if another word names the plugin.
    """
    from mplug.config.sources import from_mapping, with_home

    entries = Registry.of_process().entries("data")
    installed = {name for entry in entries for name in (entry.name, f"{entry.distribution}/{entry.name}")}
    has_name = any(word in installed for word in words)
    paths = [word for word in words if word not in installed and (has_name or _looks_like_path(word))]
    names = [word for word in words if word not in paths]
    _refuse_repeated(["--data NAME" for _ in names] + ["--data PATH" for _ in paths])
    fields = {**({"name": names[0]} if names else {}), **({"path": with_home(paths[0])} if paths else {})}
    return from_mapping({"data": fields}, "--data") if fields else {}


def _looks_like_path(word: str) -> bool:
    return (
        word.startswith((".", "/", "~"))
        or bool(Path(word).suffix)
        or any(c in word for c in "*?")
        or Path(word).exists()
        or any(path.suffix and path.stem == word for path in Path().iterdir())  # the common prefix of files
    )


def _kernel_option(kind: str, flags: Mapping[str, str]) -> str:
    """The options that choose the supplier of a kind of slots; `flags` are those of some kinds."""
    option = f"--kernels {kind}=NAME" if kind else "--kernels NAME"
    return f"--{flags[kind]} ({option})" if kind in flags else option


def _refuse_repeated(options: Sequence[str]) -> None:
    """Raise UsageError if a repeated option sets one field twice: the second value would replace the first."""
    for number, option in enumerate(options):
        if option in options[:number]:
            raise UsageError(
                f"{brief(option)} is given twice, and only one of the two could have an effect; remove one of them"
            )


def resolved(options: dict[str, Any]) -> "RunConfig":
    """The config of the default run, changed by the options of `config_options`."""
    from mplug.config.defaults import default_settings
    from mplug.registry.resolve import resolve

    return resolve(Registry.of_process(), default_settings(), overrides(**options))
