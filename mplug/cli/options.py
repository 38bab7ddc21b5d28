"""Options that several commands share, and their conversion to settings of the config."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mplug.cli.hints import assignment_hint
from mplug.config.entry import Entry
from mplug.errors import UsageError, brief
from mplug.registry.entry_points import RECIPES, Registry

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.config.sources import Settings

F = TypeVar("F", bound=Callable[..., Any])

FLAGS = {
    "model": "model.name",
    "preset": "model.preset",
    "parallel": "parallel.layout",
    "optimizer": "optimizer.name",
    "data": "data.name",
    "precision": "trainer.precision",
    "pretrained": "checkpoint.pretrained.path",
}
"""Short flags, each with the field that it sets."""


class PluginName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of an installed plugin. The shell completes it from metadata, without importing a plugin."""

    name = "name"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed names that begin with `incomplete`."""
        registry = Registry()  # each one reads all distributions
        entries = {entry.name: entry.summary for entry in registry.entries(self.kind)}
        names = [name for name in registry.names(self.kind) if name.startswith(incomplete)]
        return [CompletionItem(name, help=entries.get(name)) for name in names]


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


def added_flags(reserved: Container[str] = ()) -> dict[str, Entry]:
    """Short flags that installed distributions add (the group 'mplug.flags'); `target` is the field that each sets.

    Flags in `reserved`, and flags that two distributions claim, are left out, so that they do not disturb other runs.
    """
    claims: dict[str, list[Entry]] = {}
    for entry in Registry().flags():
        claims.setdefault(entry.name, []).append(entry)
    unique = {name.replace("-", "_"): entries[0] for name, entries in claims.items() if len(entries) == 1}
    return {name: entry for name, entry in unique.items() if name not in reserved}


def config_options(function: F) -> F:
    """Decorate a command with the options that choose and change a run's config."""
    options = [*HOST_OPTIONS]
    of_command = {parameter.name for parameter in getattr(function, "__click_params__", ())}
    for name, entry in added_flags({*HOST_NAMES, *of_command}).items():
        text = f"Set {entry.target} (from {entry.distribution})."
        value: dict[str, Any] = {"metavar": "VALUE"}
        if entry.target.startswith(KERNELS):
            text = f"Kernel plugin for {entry.target.removeprefix(KERNELS)} (from {entry.distribution})."
            value = {"type": PluginName("kernels")}
        options.insert(-2, click.option(f"--{entry.name}", name, help=text, **value))
    for option in reversed(options):
        function = option(function)
    return function


HOST_OPTIONS = [
    click.option("--model", type=PluginName("models"), help="Model family (an installed plugin)."),
    click.option("--preset", metavar="NAME", help="Preset of the model: nano, 125m, ..."),
    click.option("--parallel", metavar="LAYOUT", help="Layout: strategies with their degrees, such as tp4pp2."),
    click.option(
        "--kernels",
        metavar="NAME",
        multiple=True,
        help="Kernel plugin for every slot that it offers, or for one kind: norm=NAME (norm=null: plain torch).",
    ),
    click.option("--optimizer", type=PluginName("optimizers"), help="Optimizer (an installed plugin)."),
    click.option("--data", type=PluginName("data"), help="Data loader (an installed plugin)."),
    click.option("--precision", type=PluginName("precisions"), help="Number formats (an installed precision): bf16."),
    click.option(
        "--pretrained",
        metavar="PATH",
        help="Start with these weights: a published folder (of an installed format), a checkpoint, or a run's folder.",
    ),
    click.option(
        "--adapt",
        type=PluginName("adapters"),
        multiple=True,
        help="Train adapters instead of the model's weights (an installed adapter plugin).",
    ),
    click.option(
        "--recipe",
        type=PluginName(RECIPES),
        help="Settings of an installed recipe ('mplug recipes list'); --config and other options change them.",
    ),
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with settings."),
    click.option(
        "--set",
        "assignments",
        metavar="FIELD=VALUE",
        multiple=True,
        help="Set any field: trainer.steps=100. The last value of a field stands.",
    ),
]
"""The host's own options of `config_options`."""
KERNELS = "kernels."
"""The section of the config whose fields name the supplier of a kind of slots."""
HOST_NAMES = (*FLAGS, "kernels", "adapt", "recipe", "file", "assignments", "config", "set")
"""Names that a plugin's flag must not have."""


def overrides(
    *,
    file: Path | None,
    assignments: tuple[str, ...],
    kernels: tuple[str, ...],
    adapt: tuple[str, ...] = (),
    recipe: str | None = None,
    **flags: str | None,
) -> "Settings":
    """The settings of the command line, over those of the file that `--config` names, over those of the recipe."""
    from mplug.config.sources import merge, read_assignments, read_file
    from mplug.registry.recipes import with_recipe

    assignment_hint(assignments)
    settings: Settings = read_file(file) if file else {}
    if recipe is not None:
        settings = with_recipe(Registry(), recipe, settings)
    fields = {**{name: entry.target for name, entry in added_flags().items()}, **FLAGS}
    for flag, value in flags.items():
        if value is not None:
            settings = merge(settings, read_assignments([f"{fields[flag]}={value}"], f"--{flag.replace('_', '-')}"))
    suppliers = [value.rpartition("=") for value in kernels]
    by_kind = {field.removeprefix(KERNELS): flag for flag, field in fields.items() if field.startswith(KERNELS)}
    by_flag = [kind for kind, flag in by_kind.items() if flags.get(flag) is not None]
    _refuse_repeated([_kernel_option(kind, by_kind) for kind in (*by_flag, *(kind for kind, _, _ in suppliers))])
    _refuse_repeated([f"--adapt {name}" for name in adapt])
    for kind, _, name in suppliers:
        settings = merge(settings, read_assignments([f"kernels.{kind or 'default'}={name}"], "--kernels"))
    for name in adapt:
        settings = merge(settings, read_assignments([f"adapters.{name}={{}}"], "--adapt"))
    return merge(settings, read_assignments(assignments))


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

    return resolve(Registry(), default_settings(), overrides(**options))
