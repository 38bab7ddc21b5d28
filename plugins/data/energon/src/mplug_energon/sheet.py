"""The command `mplug contact-sheet`: draws a micro batch of images with text as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.commands import StoredPath, UserPath

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

    from mplug import MicroBatch
    from mplug_tokenization import Tokenizer

MARGIN, LINE = 4, 12
"""Pixels of the margin around an image, and of a line of its text."""
LINES = 4
"""Maximum number of lines of text under an image."""


@click.command()
@click.argument("path", type=StoredPath())
@click.option("--output", default="batch.png", show_default=True, type=UserPath(), help="The PNG file.")
@click.option("--part", default="train", show_default=True, help="Part of the data set to draw.")
@click.option("--samples", default=16, show_default=True, type=click.IntRange(1), help="Number of samples.")
@click.option("--size", default=128, show_default=True, type=click.IntRange(1), help="Side of an image in pixels.")
@click.option("--seed", default=1234, show_default=True, type=int, help="Seed of the order of samples.")
def command(path: Path, output: Path, part: str, samples: int, size: int, seed: int) -> None:
    """Draw the first batch of images with text of the data set PATH.

    The samples pass through Energon, the task encoder and the loader, as in a run. The picture shows the model's input.

    \b
    mplug contact-sheet captions/ --samples 32 --output captions.png
    """
    from mplug import UsageError
    from mplug_energon.plugin import Energon
    from mplug_energon.reading import Supplied, make_encoder, make_loader

    config = Energon.Config(
        path=str(path),
        task_encoder="image-text",
        task_encoder_options={"image_size": size},
        entries=("images",),
        streams=1,
    )
    plugin = Energon(config)
    supplied = Supplied(256, plugin.tokenizer)
    encoder = make_encoder(config.task_encoder, config.task_encoder_options, supplied)
    plugin.check_data()
    loader = make_loader(config, encoder, supplied, part=part, seed=seed, shard=(0, 1), micro_batch_size=samples)
    drawn = sheet(next(loader.take(samples)), plugin.tokenizer)
    try:
        drawn.save(output, "PNG")
    except OSError as error:
        raise UsageError(f"cannot write '{output}': {error.strerror}; choose another --output") from None
    click.echo(f"wrote {output}: {samples} samples of '{part}', {drawn.width} x {drawn.height} pixels")


def sheet(batch: "MicroBatch", tokenizer: "Tokenizer") -> "Image":
    """A micro batch with `images` [B, 3, P, P] as one picture, each image above its text (the labels)."""
    from math import ceil, sqrt

    from PIL import Image, ImageDraw

    images, labels = batch["images"].clamp(0, 1).mul(255).round().byte(), batch["labels"]
    count, _, _, size = images.shape
    columns = ceil(sqrt(count))
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    texts = [tokenizer.decode([label for label in row if label >= 0]) for row in labels.tolist()]
    captions = [lines_of(text, measure, size) for text in texts]
    width, height = size + 2 * MARGIN, size + 3 * MARGIN + LINE * max(map(len, captions))
    drawn = Image.new("RGB", (columns * width, ceil(count / columns) * height), "white")
    pen = ImageDraw.Draw(drawn)
    for number, lines in enumerate(captions):
        left, top = number % columns * width + MARGIN, number // columns * height + MARGIN
        pen.rectangle((left - 1, top - 1, left + size, top + size), outline="lightgrey")
        drawn.paste(Image.fromarray(images[number].permute(1, 2, 0).contiguous().numpy()), (left, top))
        for line, words in enumerate(lines):
            pen.text((left, top + size + MARGIN + line * LINE), words, fill="black")
    return drawn


def lines_of(text: str, pen: "ImageDraw", width: int) -> list[str]:
    """A text in at most LINES lines of `width` pixels, broken between words; dots replace the rest of a long text."""
    lines, rest = list[str](), " ".join(text.split())
    while rest and len(lines) < LINES:
        fits = next((end for end in range(len(rest), 1, -1) if pen.textlength(rest[:end]) <= width), 1)
        space = rest.rfind(" ", 0, fits + 1) if fits < len(rest) else -1
        end = space if space > 0 else fits
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    if rest:
        lines[-1] = _dotted(lines[-1], pen, width)
    return lines or [""]


def _dotted(line: str, pen: "ImageDraw", width: int) -> str:
    """The beginning of a line that fits together with dots, and the dots."""
    while line and pen.textlength(f"{line} ...") > width:
        line = line.rpartition(" ")[0] or line[:-1]
    return f"{line} ..."
