"""The commands `mplug data`. This module imports neither numpy nor pydantic, so that help and completion are fast."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from mplug.commands import OpenGroup, UserPath

if TYPE_CHECKING:
    from collections.abc import Sequence

INPUTS = click.argument("inputs", nargs=-1, required=True, type=click.Path())
FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet", "text"]),
    help="Format of the inputs; default: by their suffixes. With 'text', each file is a document.",
)
KEY = click.option("--key", default="text", show_default=True, help="Field or column with the text of a document.")
PATTERN = click.option("--pattern", help="Glob that selects files in folders, such as '**/*.py'.")


class Mebibytes(click.FloatRange):
    """A parameter type for an amount of data; it refuses 'nan', which click's range accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, if it is in the range."""
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Prefix(click.Path):
    """A parameter type for a data set, given by the prefix of its .bin and .idx or by one of these files."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The prefix, without '.bin' or '.idx'; raises UsageError for an empty name."""
        from mplug_indexed.beside import prefix_of

        return super().convert(str(prefix_of(value)), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The data sets whose prefix begins with `incomplete`."""
        folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
        found = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


DATA_SETS = click.argument("prefixes", nargs=-1, required=True, type=Prefix(), metavar="PREFIX...")


class DataCommands(OpenGroup):
    """The commands of `mplug data`; other distributions add more by entry points 'data.NAME'."""

    path = ("data",)


@click.group(cls=DataCommands)
def command() -> None:
    """Make, inspect, merge, verify and blend corpora of tokens.

    A corpus is a pair of files, PREFIX.bin and PREFIX.idx, in Megatron's format. A record beside them names the
    tokenizer that made it. Commands identify a corpus by its PREFIX.

    \b
    mplug data train-tokenizer texts.jsonl --vocab-size 8192
    mplug data preprocess texts.jsonl --tokenizer huggingface --tokenizer-file tokenizer.json --append-eod
    mplug data inspect texts
    mplug train --data indexed --set data.path=texts --set model.vocab_size=8192
    """


@command.command(short_help="Tokenize texts: JSON lines, Parquet, plain text.")
@INPUTS
@click.option(
    "--output",
    "prefix",
    type=Prefix(path_type=Path),
    help="PREFIX of the corpus; default: the name of the first input.",
)
@click.option(
    "--tokenizer",
    "name",
    required=True,
    metavar="NAME",
    help="Tokenizer plugin; 'mplug plugins list --kind tokenizers' lists the installed ones.",
)
@click.option("--tokenizer-file", metavar="FILE", help="File of the tokenizer; the same as --set path=FILE.")
@click.option("--set", "assignments", multiple=True, metavar="FIELD=VALUE", help="Option of the tokenizer.")
@FORMAT
@KEY
@PATTERN
@click.option("--append-eod", is_flag=True, help="Append the tokenizer's end-of-document token to each document.")
@click.option("--workers", type=click.IntRange(1), help="Number of processes; default: one per core.")
@click.option(
    "--bad-lines",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Invalid documents: stop at the first, or skip and count them.",
)
@click.option(
    "--chunk-mib",
    type=Mebibytes(0.001, 1 << 20),
    default=16.0,
    show_default=True,
    help="Input per task, in MiB; a killed process loses at most the work of its task.",
)
@click.option("--overwrite", is_flag=True, help="Replace a corpus of this PREFIX, or parts of another job.")
def preprocess(
    inputs: tuple[str, ...],
    prefix: Path | None,
    name: str,
    tokenizer_file: str | None,
    assignments: tuple[str, ...],
    form: str | None,
    key: str,
    pattern: str | None,
    append_eod: bool,
    workers: int | None,
    bad_lines: str,
    chunk_mib: float,
    overwrite: bool,
) -> None:
    """Tokenize texts: JSON lines (.gz, .zst), Parquet, plain text, and folders of them.

    Documents keep the order of INPUTS, and the corpus does not depend on the number of workers. If the command is
    killed, run it again: it continues after the completed parts.

    \b
    mplug data preprocess corpus.jsonl --tokenizer bytes --append-eod
    mplug data preprocess a.jsonl.zst b.parquet --output ab --tokenizer huggingface --tokenizer-file tokenizer.json
    mplug data preprocess src/ --format text --pattern '**/*.c' --output c --tokenizer bytes
    """
    from mplug import UsageError
    from mplug_indexed.preprocess.job import Job
    from mplug_indexed.preprocess.sources import find_sources
    from mplug_tokenization import describe_tokenizer

    if Path(name).is_file():
        raise UsageError(
            f"--tokenizer {name} is a file; use --tokenizer NAME with the plugin that reads it, and --tokenizer-file "
            f"{name}"
        )
    job = Job(
        prefix=prefix or _beside(inputs[0]),
        sources=find_sources(inputs, form, pattern),
        tokenizer=describe_tokenizer(name, _options(tokenizer_file, assignments), "--tokenizer-file, --set"),
        key=key,
        append_eod=append_eod,
        bad_lines=bad_lines,
        chunk_size=int(chunk_mib * (1 << 20)),
        workers=workers or _cores(),
        overwrite=overwrite,
    )
    _preprocess(job)


def _preprocess(job: Any) -> None:
    import time

    from mplug_indexed.display import progress_of, summary
    from mplug_indexed.preprocess.job import preprocess as do

    began = time.monotonic()
    with progress_of(sum(source.size for source in job.sources)) as progress:
        outcome = do(job, progress)
    for line in summary(job, outcome, time.monotonic() - began):
        click.echo(line)


@command.command(short_help="Show the size and tokenizer of corpora, and documents.")
@DATA_SETS
@click.option("--samples", type=click.IntRange(0), default=1, show_default=True, help="Documents shown per corpus.")
@click.option("--document", type=click.IntRange(0), help="Number of the first document shown; default: 0.")
@click.option(
    "--characters", type=click.IntRange(1), default=300, show_default=True, help="Characters shown per document."
)
def inspect(prefixes: tuple[str, ...], samples: int, document: int | None, characters: int) -> None:
    """Show the counts of documents, sequences and tokens, the token type and the tokenizer, and documents as text."""
    from mplug_indexed.corpora import describe, sample
    from mplug_indexed.display import columns

    described = [describe(prefix) for prefix in prefixes]
    header = ("PREFIX", "DOCUMENTS", "SEQUENCES", "TOKENS", "TYPE", "BYTES", "TOKENIZER", "VOCABULARY", "EOD")
    click.echo(columns(header, [corpus.row for corpus in described]))
    for corpus in described:
        for number, text in sample(corpus, document or 0, samples, characters):
            click.echo(f"\n{corpus.prefix}, document {number}:\n{text}")


@command.command(short_help="Merge corpora of one tokenizer into one.")
@DATA_SETS
@click.option("--output", required=True, type=Prefix(path_type=Path), help="PREFIX of the merged corpus.")
@click.option("--overwrite", is_flag=True, help="Replace a corpus of this PREFIX.")
def merge(prefixes: tuple[str, ...], output: Path, overwrite: bool) -> None:
    """Merge corpora of one tokenizer into one, in the given order."""
    from mplug_indexed.corpora import describe
    from mplug_indexed.corpora import merge as join

    join(prefixes, output, overwrite=overwrite)
    corpus = describe(output)
    click.echo(f"wrote {output}.bin and {output}.idx: {corpus.documents:,} documents, {corpus.tokens:,} tokens")


@command.command(short_help="Check every byte of corpora.")
@DATA_SETS
@click.option(
    "--vocab-size", type=click.IntRange(1), help="Number of tokens in the vocabulary; default: the tokenizer's."
)
def verify(prefixes: tuple[str, ...], vocab_size: int | None) -> None:
    """Check every byte: the index, each token against the vocabulary, and the checksums if a report has them.

    The exit status is 1 if a corpus is damaged.
    """
    from mplug_indexed.corpora import verify as check

    for prefix in prefixes:
        click.echo(f"{prefix}: {check(prefix, vocab_size)}")


@command.command(short_help="Show the shares that weights give, and write a config.")
@click.argument("weighted", nargs=-1, required=True, metavar="PREFIX=WEIGHT...")
@click.option("--tokens", type=click.IntRange(1), help="Number of training tokens; adds tokens and epochs per corpus.")
@click.option(
    "--by-size", is_flag=True, help="Multiply each weight by the tokens of its corpus; weights are then epochs."
)
@click.option("--write", type=UserPath(dir_okay=False), help="Write a config for training to this file.")
def blend(weighted: tuple[str, ...], tokens: int | None, by_size: bool, write: Path | None) -> None:
    """Show the proportion, tokens and epochs that weights give to each corpus, and write them as a config.

    \b
    mplug data blend web=0.7 code=0.2 books=0.1 --tokens 2000000000 --write blend.yaml
    mplug train --config blend.yaml
    """
    from mplug_indexed.corpora import blend as mix
    from mplug_indexed.display import columns

    mixed = mix(weighted, tokens, by_size=by_size)
    header = ("PREFIX", "WEIGHT", "PROPORTION", "TOKENS", "OF THE TRAINING", "EPOCHS")
    click.echo(columns(header, mixed.rows))
    if write is not None:
        mixed.write(write)
        click.echo(f"\nwrote {write}: mplug train --config {write}")


@command.command("train-tokenizer", short_help="Train a byte-level BPE tokenizer on texts.")
@INPUTS
@click.option(
    "--output",
    default="tokenizer.json",
    show_default=True,
    type=UserPath(dir_okay=False),
    help="Output file.",
)
@click.option(
    "--vocab-size",
    required=True,
    type=click.IntRange(257, 1 << 24),
    help="Number of tokens, including bytes and special tokens.",
)
@click.option(
    "--special",
    multiple=True,
    default=("<|endoftext|>",),
    show_default=True,
    help="Special token; the first one ends a document.",
)
@FORMAT
@KEY
@PATTERN
@click.option("--mib", type=Mebibytes(0.001, 1 << 20), help="Read only this many MiB of text, spread over the inputs.")
@click.option("--overwrite", is_flag=True, help="Replace the output file.")
def train_tokenizer(
    inputs: tuple[str, ...],
    output: Path,
    vocab_size: int,
    special: tuple[str, ...],
    form: str | None,
    key: str,
    pattern: str | None,
    mib: float | None,
    overwrite: bool,
) -> None:
    """Train a byte-level BPE tokenizer on texts, and write its tokenizer.json.

    \b
    mplug data train-tokenizer corpus.jsonl --vocab-size 8192
    """
    from mplug_indexed.preprocess.sources import find_sources
    from mplug_indexed.training import train

    trained = train(find_sources(inputs, form, pattern), output, vocab_size, special, key, mib, overwrite=overwrite)
    click.echo(f"wrote {output}: {trained.vocab_size:,} tokens, trained on {trained.documents:,} documents")
    click.echo(f"special tokens: {', '.join(f'{text} is {number}' for text, number in trained.special.items())}")
    if trained.vocab_size < vocab_size:
        click.echo(f"the documents have no more pairs to merge: {vocab_size:,} tokens need more text")
    options = ["--format", form] if form else []
    options += ["--key", key] if key != "text" else []
    options += ["--pattern", pattern] if pattern else []
    words = [*inputs, *options, "--tokenizer", "huggingface", "--tokenizer-file", str(output), "--append-eod"]
    click.echo(f"use it: mplug data preprocess {shlex.join(words)}")


def _options(file: str | None, assignments: "Sequence[str]") -> dict[str, Any]:
    """The tokenizer's options from the command line; values are written as in YAML."""
    import yaml

    from mplug import UsageError

    options: dict[str, Any] = {} if file is None else {"path": file}
    for assignment in assignments:
        field, equals, text = assignment.partition("=")
        if not equals or not field:
            raise UsageError(f"--set '{assignment}': write it as FIELD=VALUE, such as eod=</s>")
        try:
            options[field] = yaml.safe_load(text)
        except yaml.YAMLError:
            options[field] = text
    return options


def _beside(first: str) -> Path:
    """The default prefix: the name of an input without its suffixes, in the current directory."""
    path = Path(first)
    return Path(path.name.split(".")[0] or "corpus") if path.name else Path("corpus")


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
