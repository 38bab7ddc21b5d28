"""Options that several commands share, and the settings that they set."""

import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mplug.config.entry import Entry
from mplug.registry.entry_points import Registry

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.config.sources import Settings

F = TypeVar("F", bound=Callable[..., Any])

FLAGS = {
    "model": "model.name",
    "preset": "model.preset",
    "parallel": "parallel.layout",
    "attention": "kernels.attention",
    "optimizer": "optimizer.name",
    "data": "data.name",
    "precision": "trainer.precision",
}
"""Short flags, and the fields that they set."""


class PluginName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of an installed plugin; the shell completes it from metadata alone."""

    name = "name"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed names that begin with `incomplete`."""
        entries = {entry.name: entry.summary for entry in Registry().entries(self.kind)}
        names = [name for name in Registry().names(self.kind) if name.startswith(incomplete)]
        return [CompletionItem(name, help=entries.get(name)) for name in names]


class Finite(click.FloatRange):
    """A number within a range; click lets NaN through every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; an error if it is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class RunName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a run below `runs/`."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names of runs that begin with `incomplete`."""
        found = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def added_flags(taken: Container[str] = ()) -> dict[str, Entry]:
    """Short flags that installed distributions add (the group 'mplug.flags'); `target` is the field that each sets.

    A flag in `taken`, or one that two distributions claim, is left out, so that it does not disturb other runs.
    """
    claims: dict[str, list[Entry]] = {}
    for entry in Registry().flags():
        claims.setdefault(entry.name, []).append(entry)
    alone = {name.replace("-", "_"): found[0] for name, found in claims.items() if len(found) == 1}
    return {name: entry for name, entry in alone.items() if name not in taken}


def config_options(function: F) -> F:
    """Decorate a command with the options that choose and change a run's config."""
    options = [*HOSTS]
    others = {parameter.name for parameter in getattr(function, "__click_params__", ())}
    for name, entry in added_flags({*OWN, *others}).items():
        told = f"Sets {entry.target} (of {entry.distribution})."
        options.insert(-2, click.option(f"--{entry.name}", name, metavar="VALUE", help=told))
    for option in reversed(options):
        function = option(function)
    return function


HOSTS = [
    click.option("--model", type=PluginName("models"), help="Model family, an installed plugin."),
    click.option("--preset", metavar="NAME", help="A named size of the model: nano, 125m, ..."),
    click.option("--parallel", metavar="LAYOUT", help="Layout, as strategies and degrees: tp4pp2."),
    click.option("--attention", type=PluginName("kernels"), help="Plugin for the attention core."),
    click.option(
        "--kernels",
        metavar="NAME",
        multiple=True,
        help="Plugin for every slot that it offers, or for one kind: norm=NAME (norm=null: plain torch).",
    ),
    click.option("--optimizer", type=PluginName("optimizers"), help="Optimizer, an installed plugin."),
    click.option("--data", type=PluginName("data"), help="Data loader, an installed plugin."),
    click.option("--precision", metavar="FORMAT", help="Number format of weights and activations."),
    click.option("--config", "file", type=click.Path(path_type=Path), help="A YAML file of settings."),
    click.option(
        "--set", "assignments", metavar="FIELD=VALUE", multiple=True, help="Set any field: trainer.steps=100."
    ),
]
"""The host's own options of `config_options`."""
OWN = (*FLAGS, "kernels", "file", "assignments", "config", "set")


def overrides(
    *, file: Path | None, assignments: tuple[str, ...], kernels: tuple[str, ...], **flags: str | None
) -> "Settings":
    """The settings of the command line, merged over those of the file that `--config` names."""
    from mplug.config.sources import merge, read_assignments, read_file

    settings: Settings = read_file(file) if file else {}
    fields = {**{name: entry.target for name, entry in added_flags().items()}, **FLAGS}
    for flag, value in flags.items():
        if value is not None:
            settings = merge(settings, read_assignments([f"{fields[flag]}={value}"], f"--{flag.replace('_', '-')}"))
    for value in kernels:
        kind, _, name = value.rpartition("=")
        settings = merge(settings, read_assignments([f"kernels.{kind or 'default'}={name}"], "--kernels"))
    return merge(settings, read_assignments(assignments))


def resolved(options: dict[str, Any]) -> "RunConfig":
    """The config of the default run, changed by the options of `config_options`."""
    from mplug.config.defaults import default_settings
    from mplug.registry.resolve import resolve

    return resolve(Registry(), default_settings(), overrides(**options))
