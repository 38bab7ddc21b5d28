"""The options by which commands choose a saved model and how it runs forward, and the run that they describe."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mplug.commands import PluginName, RunName, StoredPath

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings, World
    from mplug_pretrained import SavedModel

F = TypeVar("F", bound=Callable[..., Any])


def model_options(verb: str, *, adapt: bool = True) -> Callable[[F], F]:
    """A decorator that adds the options of `ModelOptions`; `verb` begins the help of --pretrained: 'Evaluate'."""
    options = [
        click.option("--name", type=RunName(), help="Name of the run; default: the newest run with a checkpoint."),
        click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; default: the newest valid one."),
        click.option(
            "--pretrained",
            type=StoredPath(),
            metavar="FOLDER",
            help=f"{verb} a published checkpoint (a folder of an installed format, or its address) instead of a run.",
        ),
        click.option(
            "--adapt",
            type=PluginName("adapters"),
            multiple=True,
            help="With --pretrained: the plugin of trained adapters, whose folder a setting names "
            "(--set adapters.NAME.path).",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "cpu", "cuda"]),
            help="Device to compute on.",
        ),
        click.option(
            "--attention", type=PluginName("kernels"), help="Kernel plugin for attention; default: the run's."
        ),
        click.option(
            "--parallel", metavar="LAYOUT", help="Layout of strategies that divide the computation: tp2pp2, ep4."
        ),
        click.option("--precision", type=PluginName("precisions"), help="Number formats; default: the run's, or fp32."),
        click.option(
            "--set", "assignments", metavar="FIELD=VALUE", multiple=True, help="Set a field: kernels.attention=null."
        ),
    ]

    def added(command: F) -> F:
        for option in reversed(options if adapt else [one for one in options if one is not options[3]]):
            command = option(command)
        return command

    return added


graphs_option = click.option(
    "--graphs",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "never"]),
    help="auto: on a GPU, replay the step of a token as a CUDA graph if all parts of the run state that they can.",
)
"""The option of commands whose `Sampler` may replay steps."""


@dataclass(frozen=True)
class Chosen:
    """A saved model and its prepared run, with the settings that produce it in each process.

    `directory` is the folder of the run that was trained; None for a published folder.
    """

    base: "Settings"
    overrides: "Settings"
    run: "Run"
    weights: "SavedModel"
    directory: Path | None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The values of `model_options`."""

    name: str | None
    step: int | None
    pretrained: Path | None
    adapt: tuple[str, ...] = ()
    device: str
    attention: str | None
    parallel: str | None
    precision: str | None
    assignments: tuple[str, ...]

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other."""
        from mplug import UsageError

        if self.pretrained is not None and (self.name is not None or self.step is not None):
            raise UsageError("--pretrained names a folder, and --name and --step a run; use one of them")
        if self.adapt and self.pretrained is None:
            raise UsageError("--adapt applies to --pretrained; a run has its own adapters")

    def directory(self, world: "World | None") -> Path:
        """The folder of the run, with a line for the user if it is not the newest run."""
        from mplug.commands import find_directory
        from mplug_saving import newest_saved

        if self.name is not None:
            return find_directory(self.name)
        found, newest = newest_saved(), find_directory(None)
        if found != newest and (world is None or world.rank == 0):
            click.echo(f"mplug: reading '{found}': the newer run '{newest}' has no checkpoint", err=True)
        return found

    def settings(self, command: str, *own: str) -> "Settings":
        """The settings of a command: those of the options, `own` ones, and at last the user's assignments."""
        from mplug.commands import assignment_hint, merge, read_assignments

        assignment_hint(self.assignments)
        fixed = [
            f"trainer.device={self.device}",
            "trainer.graphs=false",
            f"parallel.layout={self.parallel or ''}",
        ]
        precision = self.precision
        if self.pretrained is not None:
            fixed.append(f"checkpoint.pretrained.path={self.pretrained}")
            precision = precision or "fp32"
        given = {"kernels.attention": self.attention, "trainer.precision": precision}
        fixed += [f"{field}={value}" for field, value in given.items() if value is not None]
        fixed += [f"adapters.{name}={{}}" for name in self.adapt]
        return merge(read_assignments([*fixed, *own], command), read_assignments(self.assignments))

    def chosen(
        self,
        settings: "Settings",
        world: "World | None",
        batch_size: int | None,
        most: int,
        unknown: int | None = None,
    ) -> Chosen:
        """The model that the options choose, with a run that evaluates micro batches of `batch_size` samples.

        None: the run's own size. The length of sequences of a published model is the longest one that it supports, at
        most `most` tokens; `unknown` if its family does not know it.
        """
        from mplug.commands import default_settings, saved_settings
        from mplug_pretrained import SavedModel, folder_length, settle_forward

        if self.pretrained is not None:
            weights, base = SavedModel.published(self.pretrained), default_settings()
            settings = folder_length(self.pretrained, base, settings, most, unknown)
            run, overrides = settle_forward(base, settings, world, batch_size)
            return Chosen(base, overrides, run, weights, None)
        directory = self.directory(world)
        base = saved_settings(directory)
        run, overrides = settle_forward(base, settings, world, batch_size)
        return Chosen(base, overrides, run, checkpoint_of(run, directory, self.step), directory)


def checkpoint_of(run: "Run", directory: Path, step: int | None) -> "SavedModel":
    """The checkpoint of a run's folder, with lines for the user about newer ones that are not valid."""
    from mplug_pretrained import SavedModel

    weights, lines = SavedModel.of_run(run, directory, step)
    for line in lines:
        click.echo(f"mplug: {line}", err=True)
    return weights


def refuse_scores(run: "Run", directory: Path | None) -> None:
    """Raise UsageError if the objective of a run gives its model another end than logits (the attribute `computes`).

    `directory` is that of the run; a published folder (None) has no objective.
    """
    from mplug import UsageError

    if directory is None:
        return
    for chosen in run.config.chosen:
        if computes := getattr(chosen.plugin, "computes", ""):
            raise UsageError(
                f"the model of run '{directory}' computes {computes} ({chosen.label}), and continues no text; write it "
                f"for software that computes scores (mplug checkpoint export FOLDER --to huggingface --name "
                f"{directory.name}), or name another run with --name"
            )


def end_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end a text, by a published folder."""
    from mplug_pretrained import format_of

    found = format_of(folder)
    ends: frozenset[int] = frozenset() if found is None else found.ask("end_tokens", folder)
    return ends
