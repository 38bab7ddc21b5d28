"""mplug checkpoint export and import."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from mplug.cli.options import PluginName, RunName, StoredPath, UserPath, config_options, resolved
from mplug.errors import UsageError, counted, listed, suggest
from mplug.registry.stores import is_address, stores_for

if TYPE_CHECKING:
    from mplug.run.run import Run

DTYPES = ("float32", "bfloat16", "float16")


class NewFolder(UserPath):
    """The path of a new folder, or the address of a store (a `str`)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path or the address."""
        return value if isinstance(value, str) and is_address(value) else super().convert(value, param, ctx)


@click.command("export")
@click.argument("folder", type=NewFolder())
@click.option(
    "--to",
    "name_of_format",
    type=PluginName("formats"),
    required=True,
    help="The format (an installed plugin): that of a whole model, into whose weights adapters are merged, or that of "
    "adapters alone.",
)
@click.option("--name", type=RunName(), help="Name of the run; default: the newest run.")
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; default: the newest valid one.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Type of all tensors; default: that of the published checkpoint that the run began with, or that of the run.",
)
@click.option(
    "--shard-size",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Maximum size of a file in GB. A run that began with a published checkpoint keeps that checkpoint's files.",
)
@click.option(
    "--quantize",
    metavar="NAME",
    help="Quantise the weights of linear layers, of --to huggingface: int8 or int4, by torchao. It needs the memory of "
    "the whole model.",
)
@click.option(
    "--averages/--weights",
    default=None,
    help="Write the averages of the weights that the run keeps, or the weights that it trains; default: the averages, "
    "if the run keeps some and trainer.eval_averages is on.",
)
def export_(
    folder: Path | str,
    name_of_format: str,
    name: str | None,
    step: int | None,
    dtype: str | None,
    shard_size: float,
    quantize: str | None,
    averages: bool | None,
) -> None:
    """Write the weights of a run to FOLDER, in a format of other software.

    FOLDER must not exist. It may be the address of a store, s3://BUCKET/FOLDER. 'mplug plugins list --kind formats'
    lists the installed formats, and 'mplug explain' says what they write of a run. If the run began with a published
    checkpoint of the format, the files that this checkpoint has beside its weights are kept, such as the tokenizer and
    the chat template.

    If the run has adapters (mplug train --adapt), an export of the whole model multiplies them into the weights, in
    fp32.
    """
    from mplug.model.build import build_model
    from mplug.run.folder import find_directory
    from mplug_checkpoint.export import export_public
    from mplug_pretrained.external_form import refuse_lossy
    from mplug_pretrained.formats import format_named
    from mplug_pretrained.public_load import KEPT
    from mplug_pretrained.published import ExportOptions
    from mplug_saving.folder import at_step
    from mplug_saving.opened import open_together
    from mplug_saving.verified import Verified

    found, directory = format_named(name_of_format), find_directory(name)
    _refuse_existing(folder)
    checkpoint, run = at_step(directory / "checkpoints", step), saved_run(directory)
    kept = directory / KEPT / found.name
    if quantize is not None:
        _refuse_unknown_quantization(quantize, name_of_format, found.format.quantizations)
    options = ExportOptions(dtype, int(shard_size * 1e9), kept if kept.is_dir() else None, quantize)
    model = build_model(run)
    export = found.format.export(run, model, options)
    merged = {name for merge in export.merges.values() for name in merge.inputs}
    own = {name for name in model.placements if not (model.beside and name.startswith(model.beside))}
    refuse_lossy(export.conversion, own - merged)
    if step is None:
        from mplug_saving.newest_valid import choose

        opened = choose(run, checkpoint, Verified()).opened
    else:
        opened = open_together(run, checkpoint)
    kept_averages = bool(opened.index.averaged())
    if averages and not kept_averages:
        raise UsageError(f"--averages: '{opened.path}' has no averages of the weights; remove the option")
    wanted = run.config.trainer.eval_averages if averages is None else averages
    with _written_to(folder, directory) as target:
        files = export_public(export, opened, target, wanted)
    number = counted(len(export.conversion.public), "tensor")
    values = "" if not kept_averages else ": the averages of the weights" if wanted else ": the weights, not averages"
    click.echo(f"'{folder}' has {number} of '{opened.path}' in {counted(len(files), 'file')}{values}")
    for clause in found.ask("usage", run, str(folder)):
        click.echo(f"  {clause}")


def _refuse_unknown_quantization(name: str, name_of_format: str, known: Sequence[str]) -> None:
    """Raise UsageError unless the format writes this quantised form."""
    if name not in known:
        writes = f"writes {listed(known)}{suggest(name, known)}" if known else "writes no quantised weights"
        raise UsageError(f"--quantize {name}: the format '{name_of_format}' {writes}; change or remove the option")


def _refuse_existing(folder: Path | str) -> None:
    """Raise UsageError if the target of an export exists."""
    if isinstance(folder, str):
        stores_for(folder).refuse_existing(folder)
    elif folder.exists() or folder.is_symlink():
        raise UsageError(f"'{folder}' exists already; use another folder, or remove it")


@contextmanager
def _written_to(folder: Path | str, directory: Path) -> "Iterator[Path]":
    """The path of a new folder that the block writes; what an address names is copied there after the block."""
    if isinstance(folder, Path):
        yield folder
        return
    with TemporaryDirectory(prefix=".export-", dir=directory) as temporary:
        yield Path(temporary) / "export"
        stores_for(folder).deliver(Path(temporary) / "export", folder)


@click.command("import")
@click.argument("folder", type=StoredPath(exists=True, file_okay=False))
@click.option(
    "--from",
    "name_of_format",
    type=PluginName("formats"),
    required=True,
    help="The format of the checkpoint (an installed plugin).",
)
@config_options
@click.option("--name", type=RunName(), required=True, help="Name of the new run, which has one checkpoint.")
def import_(folder: Path, name_of_format: str, name: str, **options: Any) -> None:
    """Read a checkpoint of another library into a new run.

    FOLDER may be the address of a store, s3://BUCKET/FOLDER.

    The section 'model' must describe the model: the shapes of all tensors are compared, and the settings that the
    checkpoint states. The tensors have the names of the model's own parameters or of its published form, or the
    format knows its names. The tokenizer is not imported. Reading the checkpoint runs no code from it.

    If the checkpoint has the states that the run's optimizer keeps, they are imported too, and the run can be resumed
    at the checkpoint's step. Otherwise the new run has one checkpoint, of step 0, whose weights start other runs.

    \b
    mplug checkpoint import --from FORMAT ckpt --name base --model llama --set model.num_layers=32 ...
    mplug train runs/base/config.yaml --pretrained runs/base --name chat ...
    """
    from mplug.model.build import build_model
    from mplug.run.folder import new_directory
    from mplug.run.prepare import prepare
    from mplug_checkpoint.new_run import contents, refuse_unusable_name, write_import
    from mplug_checkpoint.states import states_of
    from mplug_pretrained.foreign import open_foreign
    from mplug_pretrained.foreign_match import match
    from mplug_pretrained.formats import format_named

    source = format_named(name_of_format)
    config = resolved({**options, "parallel": ""})
    run = prepare(config)
    run.directory = new_directory(config, name)
    refuse_unusable_name(run.directory)
    model, read = build_model(run), open_foreign(source.name, source.format.open, folder)
    notes = [*read.compare(config)]
    found = match(model, read)
    states = states_of(run, model, found)
    total = sum(one.num_bytes for one in contents(run, model, states))
    with progress(f"importing '{read.path}'", total) as advance:
        write_import(run, model, found, states, source.name, advance)
    number = counted(len(model.placements), "parameter")
    click.echo("; ".join([f"run '{run.directory}' has the {number} of '{read.path}'", *notes]))
    if states.of:
        click.echo(
            f"it also has the optimizer's states after step {read.step}; continue: mplug train --resume --name {name} "
            f"--set trainer.steps=N"
        )
    else:
        click.echo(
            f"no optimizer states were imported ({states.reason}); start a run with its settings and weights: "
            f"{train_from(run)}"
        )


@contextmanager
def progress(description: str, total: int) -> "Iterator[Callable[[int], None]]":
    """A progress bar in bytes, on a terminal; the block calls the function with the bytes that it has completed."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def train_from(run: "Run") -> str:
    """The command that starts a run with the settings and the weights of a new run."""
    return f"mplug train {run.directory}/config.yaml --pretrained {run.directory}"


def saved_run(directory: Path) -> "Run":
    """The run of a folder, prepared for one process on the CPU."""
    from mplug.config.defaults import saved_settings
    from mplug.config.sources import read_assignments
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare

    own = ("trainer.device=cpu", "parallel.layout=", "trainer.graphs=false")
    return prepare(resolve(Registry(), saved_settings(directory), read_assignments(own, "checkpoint export")))
