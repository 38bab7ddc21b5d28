"""mplug checkpoint export and import."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from mplug.cli.options import RunName, config_options, resolved
from mplug.errors import UsageError, counted
from mplug.open_lists import FOREIGN_CHECKPOINTS

if TYPE_CHECKING:
    from mplug.checkpoint.export import Export
    from mplug.checkpoint.published import Published
    from mplug.model.model import Model
    from mplug.run.run import Run

DTYPES = ("float32", "bfloat16", "float16")


@click.command("export")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "peft"]),
    required=True,
    help="The form: hf is the whole model for Hugging Face's transformers, with adapters merged into its weights; peft "
    "is the adapters alone.",
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
def export_(folder: Path, form: str, name: str | None, step: int | None, dtype: str | None, shard_size: float) -> None:
    """Write the weights of a run to FOLDER, in the form in which models are published.

    FOLDER must not exist. The transformers library loads it, and so does 'mplug train --pretrained FOLDER'. If the run
    began with a published checkpoint, its tokenizer, chat template, config.json and generation_config.json are kept.

    If the run has adapters (mplug train --adapt), '--to hf' multiplies them into the weights, in fp32. '--to peft'
    writes the adapters alone, as the library PEFT reads them.

    \b
    mplug checkpoint export --to hf my-model --name chat
    mplug checkpoint export --to peft my-adapters --name chat
    """
    from mplug.checkpoint.export import export_public
    from mplug.checkpoint.folder import at_step
    from mplug.checkpoint.opened import open_together
    from mplug.checkpoint.verified import Verified
    from mplug.model.build import build_model
    from mplug.run.folder import find_directory

    directory = find_directory(name)
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"'{folder}' exists already; use another folder, or remove it")
    checkpoint, run = at_step(directory / "checkpoints", step), saved_run(directory)
    export = (_whole_model if form == "hf" else _adapters)(run, directory, build_model, dtype, int(shard_size * 1e9))
    if step is None:
        from mplug.checkpoint.newest_valid import choose

        opened = choose(run, checkpoint, Verified()).opened
    else:
        opened = open_together(run, checkpoint)
    shards = export_public(export, opened, folder)
    number = counted(len(export.conversion.public), "tensor")
    click.echo(f"'{folder}' has {number} of '{opened.path}' in {counted(len(shards), 'file')}")


def _whole_model(
    run: "Run", directory: Path, build_model: "Callable[[Run], Model]", dtype: str | None, shard_bytes: int
) -> "Export":
    """The export of the whole model, with its adapters merged into the weights."""
    from mplug.checkpoint.export import Export, refuse_lossy
    from mplug.checkpoint.public_weights import conversion
    from mplug.checkpoint.published import published_of

    original = published_of(directory)
    config = _config_json(run, original)
    model = build_model(run)
    made = conversion(model)
    merged = {name for merge in model.merges.values() for name in merge.inputs}
    refuse_lossy(made, model.placements.keys() - merged)
    weights = dtype or _config_dtype(config) or str(run.precision.weights)
    export = Export(made, {**config, "dtype": weights}, weights, shard_bytes, original, dtype, merges=model.merges)
    if original is not None and dtype is None and "quantization_config" not in original.config:
        return replace(export, config=original.config)
    return export


def _adapters(
    run: "Run", _directory: Path, build_model: "Callable[[Run], Model]", dtype: str | None, _shard_bytes: int
) -> "Export":
    """The export of the adapters alone, in the dtype of their masters: one file, whatever its size."""
    from mplug.checkpoint.adapter_files import CONFIG, WEIGHTS, adapter_conversion, adapters_of
    from mplug.checkpoint.export import Export

    model = build_model(run)
    adapters, made = adapters_of(model), adapter_conversion(model)
    weights = dtype or str(run.precision.masters)
    files = Export(made, adapters.config, weights, sys.maxsize, None, dtype, WEIGHTS, CONFIG)
    return replace(files, offsets=adapters.offsets)


class ForeignForm(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a form of foreign checkpoints, of the host or of an installed distribution."""

    name = "form"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin with `incomplete`."""
        return [CompletionItem(name) for name in FOREIGN_CHECKPOINTS.names() if name.startswith(incomplete)]


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--from",
    "form",
    type=ForeignForm(),
    required=True,
    help="The form: megatron (torch_dist of Megatron-LM), or one that an installed plugin adds.",
)
@config_options
@click.option("--name", type=RunName(), required=True, help="Name of the new run, which has one checkpoint.")
def import_(folder: Path, form: str, name: str, **options: Any) -> None:
    """Read a checkpoint of another library into a new run.

    The section 'model' must describe the model: the shapes of all tensors are compared, and the settings that the
    checkpoint states. The tensors have the names of the model's own parameters or of its published form, or the form
    knows its names. The tokenizer is not imported. Reading the checkpoint runs no code from it.

    If the checkpoint has the states that the run's optimizer keeps, they are imported too, and the run can be resumed
    at the checkpoint's step. Otherwise the new run has one checkpoint, of step 0, whose weights start other runs.

    \b
    mplug checkpoint import --from megatron ckpt --name base --model llama --set model.num_layers=32 ...
    mplug train --name chat --pretrained runs/base ...
    """
    from mplug.checkpoint.foreign import open_foreign
    from mplug.checkpoint.foreign_import import contents, refuse_unusable_name, write_import
    from mplug.checkpoint.foreign_match import match
    from mplug.checkpoint.foreign_states import states_of
    from mplug.model.build import build_model
    from mplug.run.folder import new_directory
    from mplug.run.prepare import prepare

    config = resolved({**options, "parallel": ""})
    run = prepare(config)
    run.directory = new_directory(config, name)
    refuse_unusable_name(run.directory)
    model, read = build_model(run), open_foreign(form, folder)
    notes = [*read.compare(config)]
    found = match(model, read)
    states = states_of(run, model, found)
    total = sum(one.num_bytes for one in contents(run, model, states))
    with _progress(f"importing '{read.path}'", total) as advance:
        write_import(run, model, found, states, form, advance)
    number = counted(len(model.placements), "parameter")
    click.echo("; ".join([f"run '{run.directory}' has the {number} of '{read.path}'", *notes]))
    if states.of:
        click.echo(
            f"it also has the optimizer's states after step {read.step}; continue: mplug train --resume --name {name} "
            f"--set trainer.steps=N"
        )
    else:
        click.echo(
            f"no optimizer states were imported ({states.reason}); start a run with the weights: mplug train "
            f"--pretrained {run.directory}"
        )


@contextmanager
def _progress(description: str, total: int) -> "Iterator[Callable[[int], None]]":
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


def saved_run(directory: Path) -> "Run":
    """The run of a folder, prepared for one process on the CPU."""
    from mplug.config.defaults import saved_settings
    from mplug.config.sources import read_assignments
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare

    own = ("trainer.device=cpu", "parallel.layout=", "trainer.graphs=false")
    return prepare(resolve(Registry(), saved_settings(directory), read_assignments(own, "checkpoint export")))


def _config_json(run: "Run", original: "Published | None") -> dict[str, Any]:
    """The config.json of the export, without a quantisation: the original one if it describes the run's model."""
    from mplug.registry.public_export import describes, public_config_of

    if original is not None and describes(run.config, original.files / "config.json"):
        return {name: value for name, value in original.config.items() if name != "quantization_config"}
    return public_config_of(run.config)


def _config_dtype(config: dict[str, Any]) -> str | None:
    """The type of the weights that a config.json states, if it is one that can be written."""
    named = str(config.get("dtype", config.get("torch_dtype")))
    return named if named in DTYPES else None
