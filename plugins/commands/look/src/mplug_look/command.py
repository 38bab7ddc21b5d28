"""mplug data look."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mplug.commands import UserPath, config_options

if TYPE_CHECKING:
    from mplug import Run


@click.command()
@config_options
@click.option(
    "--split", type=click.Choice(["train", "validation"]), default="train", show_default=True, help="Split to show."
)
@click.option("--samples", default=8, show_default=True, type=click.IntRange(1, 1000), help="Number of samples.")
@click.option("--skip", default=0, show_default=True, type=click.IntRange(0), help="Number of samples to pass first.")
@click.option(
    "--output",
    default="samples.html",
    show_default=True,
    type=UserPath(dir_okay=False),
    help="File for the page.",
)
def command(split: Literal["train", "validation"], samples: int, skip: int, output: Path, **options: Any) -> None:
    """Show samples of a run's data as the model receives them, in an HTML page.

    The samples pass through the data plugin and the processor of the model, in the order in which the run takes them.
    The page shows their tokens, which of them are targets, the borders of documents, and the pictures, restored from
    what the tower receives. It contains everything that it shows, and nothing else is loaded. Under a layout, it shows
    the samples of the first rank. The options are those of 'mplug train'.

    \b
    mplug data look --config run.yaml --set data.path=shapes --samples 16
    mplug data look --data packed --set data.path=chats.jsonl --split validation
    """
    from mplug import UsageError, counted, write_whole
    from mplug.commands import prepare, resolved

    if not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder '{output.parent}' for '{output.name}'; create it")
    run = prepare(resolved(options))
    run.device = "cpu"
    page = _page(run, split, samples, skip)
    try:
        write_whole(output, page)
    except OSError as error:
        raise UsageError(f"cannot write --output '{output}': {error.strerror}; use another file") from None
    click.echo(f"wrote {output}: {counted(samples, 'sample')} of '{split}'")


def _page(run: "Run", split: Literal["train", "validation"], samples: int, skip: int) -> str:
    from mplug_look.page import page_of
    from mplug_look.samples import read_samples

    tokenizer = run.hooks.call.build_tokenizer(run=run)
    shown, entries = read_samples(run, split, skip, samples, tokenizer)
    plugins = ", ".join(chosen.label for chosen in run.config.chosen if chosen.entry.kind in ("models", "data"))
    return page_of(f"Samples of '{split}'", plugins, shown, entries)
