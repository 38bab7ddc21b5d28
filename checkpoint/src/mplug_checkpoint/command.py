"""mplug checkpoint."""

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.cli.groups import OpenGroup
from mplug.cli.options import RunName
from mplug.cli.tables import human_bytes, table
from mplug.errors import RunError, UsageError, printable
from mplug_checkpoint.conversion import export_, import_
from mplug_checkpoint.upcycle import upcycle

if TYPE_CHECKING:
    from mplug_saving.manifest import Manifest, SavedTensor

run_option = click.option("--name", type=RunName(), help="Name of the run; default: the newest run.")
step_option = click.option("--step", type=int, help="Step of the checkpoint; default: the newest checkpoint.")


class CheckpointCommands(OpenGroup):
    """The commands of `mplug checkpoint`."""

    path = ("checkpoint",)


@click.group(cls=CheckpointCommands)
def command() -> None:
    """List, show and verify the checkpoints of a run, and convert them from and to other forms.

    A checkpoint consists of safetensors files and JSON. Reading it runs no code from it.
    """


@command.command("list")
@run_option
def list_(name: str | None) -> None:
    """List the complete checkpoints of a run, the oldest first."""
    from mplug_saving.folder import complete, read_described
    from mplug_saving.names import step_of

    folder = _folder(name)
    rows = []
    for path in complete(folder):
        try:
            manifest = read_described(path)
        except (UsageError, RunError) as error:
            rows.append((step_of(path), "-", "-", "-", str(error)))
            continue
        rows.append((manifest["step"], manifest["saved"], _layout(manifest), human_bytes(_bytes(manifest)), "complete"))
    if not rows:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; use another run with --name")
    click.echo(table(("STEP", "SAVED", "LAYOUT", "SIZE", "STATE"), rows))


@command.command()
@run_option
@step_option
@click.option("--tensors", is_flag=True, help="Also list every tensor with its shape, type and boxes.")
def show(name: str | None, step: int | None, tensors: bool) -> None:
    """Show the contents of a checkpoint: position, layout, provenance, files, tensors."""
    from mplug_saving.folder import read_described
    from mplug_saving.saved_fields import shown

    path = _path(name, step)
    manifest = read_described(path)
    provenance = manifest["provenance"]
    click.echo(f"{path}")
    click.echo(f"  step     {manifest['step']}, {manifest['samples']:,} samples, {manifest['tokens']:,} tokens")
    click.echo(f"  saved    {manifest['saved']} by mplug {provenance['mplug']}, torch {provenance['torch']}")
    click.echo(f"  layout   {_layout(manifest)}, {manifest['world_size']} processes")
    if "imported" in manifest:
        click.echo(f"  from     {manifest['imported']}")
    for plugin in provenance["plugins"]:
        click.echo(f"  plugin   {plugin['plugin']} ({plugin['distribution']} {plugin['version']})")
    for change in manifest.get("changes", []):
        text = change.get("version")
        if text is None:
            old, new = (printable(shown(value)) for value in (change["old"], change["new"]))
            text = f"{change['field']}: {old} -> {new}"
        click.echo(f"  changed  {text}, from step {change['step'] + 1} on")
    weights = [saved for key, saved in manifest["tensors"].items() if key.endswith("/weight") and key[0] != "/"]
    click.echo(f"  weights  {sum(_numel(saved) for saved in weights):,} in {len(weights)} parameters")
    click.echo(f"  files    {len(manifest['files'])}, {human_bytes(_bytes(manifest))}")
    if tensors:
        rows = [
            (printable(key), _shape(saved), saved["dtype"], len(saved["chunks"]))
            for key, saved in manifest["tensors"].items()
        ]
        click.echo("\n" + table(("TENSOR", "SHAPE", "TYPE", "BOXES"), rows))


@command.command("verify")
@run_option
@step_option
def verify_(name: str | None, step: int | None) -> None:
    """Verify the checksums and headers of all checkpoints of a run, or of one with --step.

    The command reads all files completely. The exit status is 2 if a checkpoint is not valid, and 1 if a
    file cannot be read. A damaged checkpoint may stay: a resumed run and the other commands skip it, unless --step
    names it.
    """
    from rich.console import Console
    from rich.progress import track

    from mplug_saving.folder import REMEDY, complete, read_valid
    from mplug_saving.names import step_of

    console = Console()
    paths = [_path(name, step)] if step is not None else complete(_folder(name))
    if not paths:
        raise UsageError(f"there is no complete checkpoint in '{_folder(name)}'; use another run with --name")
    problems: list[UsageError | RunError] = []
    valid: list[int] = []
    for path in paths:
        label = f"step {step_of(path)}"
        try:
            shown = partial(track, description=label, transient=True, disable=not console.is_terminal)
            manifest = read_valid(path, shown)
        except (UsageError, RunError) as error:
            if not os.path.lexists(path):
                click.echo(f"{label}: the run has removed it meanwhile")
                continue
            problems.append(error)
            continue
        click.echo(f"{label}: {len(manifest['files'])} files match their checksums")
        valid.append(manifest["step"])
    if problems:
        kind = UsageError if any(isinstance(error, UsageError) for error in problems) else RunError
        lines = [str(error).removesuffix(REMEDY) for error in problems]
        if valid and kind is UsageError:
            lines.append(f"commands skip damaged checkpoints; the newest valid one is that of step {max(valid)}")
        raise kind("\n".join(lines))


command.add_command(export_)
command.add_command(import_)
command.add_command(upcycle)


def _folder(name: str | None) -> Path:
    from mplug.run.folder import find_directory

    return find_directory(name) / "checkpoints"


def _path(name: str | None, step: int | None) -> Path:
    from mplug_saving.folder import at_step

    return at_step(_folder(name), step)


def _layout(manifest: "Manifest") -> str:
    return manifest["layout"] or "one process"


def _bytes(manifest: "Manifest") -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def _shape(saved: "SavedTensor") -> str:
    return "x".join(map(str, saved["shape"])) or "scalar"


def _numel(saved: "SavedTensor") -> int:
    return math.prod(saved["shape"])
