"""mplug evaluate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import PluginName, StoredPath
from mplug_sampling.saved_model import ModelOptions, model_options

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import World
    from mplug_evaluate.work import Job

LONGEST = 2048
"""The default length of sequences with --pretrained, unless the model supports less."""
ALL = "all"


class Count(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A positive number, or the word 'all'."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or the word."""
        if value == ALL or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not str(value).isascii() or not str(value).isdigit() or int(value) < 1:
            self.fail(f"'{value}' is neither a positive number nor '{ALL}'.", param, ctx)
        return int(value)


class TextFile(StoredPath):
    """A file of text, or its address. A folder and a missing file have a message with what is meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path of the file."""
        path = Path(super().convert(value, param, ctx))
        if path.is_dir():
            if (path / "config.yaml").is_file():
                meant = f"to evaluate the run '{path}', use --name {path.name}"
            elif (path / "config.json").is_file():
                meant = f"to evaluate the model in it, use --pretrained {path}, and name files of text"
            else:
                meant = f"name its files, as in {path}/*.txt"
            self.fail(f"'{value}' is a folder; {meant}", param, ctx)
        if not path.exists():
            is_run = (Path("runs") / str(value) / "config.yaml").is_file()
            meant = f"to evaluate the run '{value}', use --name {value}" if is_run else "name a file of text"
            self.fail(f"there is no file '{value}'; {meant}", param, ctx)
        return path


@click.command()
@click.argument("files", nargs=-1, type=TextFile(), metavar="[FILE]...")
@model_options("Evaluate")
@click.option("--data", type=PluginName("data"), help="Data loader to take samples from; default: the run's.")
@click.option(
    "--split",
    type=click.Choice(["validation", "train"]),
    help="Split of the loader's data; default: validation.",
)
@click.option(
    "--samples",
    type=Count(),
    metavar="N",
    help="Number of the loader's samples, or 'all' for one epoch; default: trainer.eval_samples.",
)
@click.option(
    "--seq-length",
    type=click.IntRange(1, 2**31),
    metavar="N",
    help=f"Tokens of a sequence; default: the run's. With --pretrained: what the model supports, at most {LONGEST}.",
)
@click.option(
    "--stride",
    type=click.IntRange(1, 2**31),
    metavar="N",
    help="Tokens of a file by which a sequence follows the one before; default: --seq-length, without overlap.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 2**20),
    metavar="N",
    help="Sequences of a forward pass on a rank; default: the run's. It does not change the result.",
)
@click.option(
    "--accuracy",
    is_flag=True,
    help="Also the share of the loader's targets whose label has the highest logit, beside the share and the loss of a "
    "model that knows the frequencies of the labels alone.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File for the JSON.")
def command(**options: Any) -> None:
    """Loss and perplexity of files, or of a run's own data.

    A FILE is a text in UTF-8. If its name ends in '.jsonl', each line is a JSON object whose field 'text' is a
    document. Every token is predicted once, the last ones of a document too: a sequence that they do not fill is
    padded, and the padding has no loss. The first token is predicted if the tokenizer states a token in front of
    documents. With --stride, sequences overlap: all but the last N predictions of a sequence are then context only.

    Without FILE, the samples are those of the loader of the run, or of --data.

    The result does not depend on the layout, except for rounding.

    \b
    mplug evaluate book.txt --name first
    mplug evaluate --name first --samples all --parallel dp2
    mplug evaluate --name classes --samples all --accuracy
    mplug evaluate --pretrained Qwen3-8B --precision bf16 --parallel tp2 wiki.txt --output result.json
    mplug evaluate --pretrained DIR --data packed --set data.path=chats.jsonl --samples all
    mplug evaluate --pretrained DIR --adapt lora --set adapters.lora.path=TRAINED book.txt
    """
    from mplug.commands import launched
    from mplug_evaluate.report import refuse_unwritable, report
    from mplug_evaluate.work import evaluate, prepared
    from mplug_pretrained import run_forward

    asked, world = Asked(**options), launched()
    asked.refuse_contradictions()
    job, run = _job(asked, world)
    is_first = world is None or world.rank == 0
    if asked.output is not None and is_first:
        refuse_unwritable(asked.output)
    prepared(job)  # refuses before any process starts
    found = run_forward(run, world, evaluate, job)
    if is_first:
        report(found, asked.output)


@dataclass(frozen=True, kw_only=True)
class Asked(ModelOptions):
    """The options of the command line."""

    files: tuple[Path, ...]
    data: str | None
    split: str | None
    samples: int | str | None
    seq_length: int | None
    stride: int | None
    batch_size: int | None
    accuracy: bool
    output: Path | None

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other."""
        from mplug import UsageError

        super().refuse_contradictions()
        of_loader = {"--data": self.data, "--split": self.split, "--samples": self.samples}
        of_loader["--accuracy"] = self.accuracy or None
        given = [option for option, value in of_loader.items() if value is not None]
        if self.files and given:
            raise UsageError(
                f"{given[0]} applies to samples of a loader, and '{self.files[0]}' is a file; use one of both"
            )
        if not self.files and self.stride is not None:
            raise UsageError("--stride divides files into sequences, and there is no file; name one, or leave it out")
        if not self.files and self.pretrained is not None and self.data is None:
            raise UsageError("--pretrained has no data of its own; name files, or a loader by --data and its settings")

    def own_settings(self) -> list[str]:
        """The settings of the options that only this command has."""
        given = {"trainer.seq_length": self.seq_length, "data.name": self.data}
        return [f"{field}={value}" for field, value in given.items() if value is not None]


def _job(asked: Asked, world: "World | None") -> tuple["Job", "Run"]:
    """What each process does, and the prepared run."""
    from mplug.commands import Registry
    from mplug_evaluate.documents import Start, read_documents
    from mplug_evaluate.work import Job, refuse_texts
    from mplug_tokenization import folder_tokenizer

    found = asked.chosen(asked.settings("evaluate", *asked.own_settings()), world, asked.batch_size, LONGEST)
    documents = None
    if asked.files:
        refuse_texts(found.run.config, asked.files[0])
        if found.directory is None:
            start = Start.of_folder(folder_tokenizer(Registry(), found.weights.path))
        else:
            start = Start.of_run(found.run, found.directory)
        documents = [read_documents(path, start) for path in asked.files]
    split = asked.split or "validation"
    return Job(
        *(found.base, found.overrides, found.weights, documents),
        *(asked.stride, split, asked.samples, asked.accuracy),
    ), found.run
