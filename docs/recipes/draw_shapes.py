"""Draw pictures of shapes, with questions and answers: a data set for models that see, made in seconds.

    python docs/recipes/draw_shapes.py shapes

A picture shows one to three equal shapes in one of its quarters. A combination is a shape, a colour, a size, a quarter
and a number: 480 in all. The validation part and the test part have only combinations that no picture of another part
has. The place of each shape in its quarter, the shade of its colour and the background are random.

Each sample has the files `KEY.json` and `KEY.0.png`. The JSON is a conversation of five questions about the picture, in
a random order, each with its answer. The pictures are in WebDataset tars, which the script indexes at the end as
`energon prepare` does. A seed determines every byte of the tars. `texts.jsonl` has the texts from which docs/vision.md
trains a tokenizer.
"""

import argparse
import io
import json
import random
import tarfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

SIDE, CELL = 64, 16
"""Pixels of a picture's side. A quarter has 2 x 2 cells, each with room for one shape."""
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "white": (230, 230, 230),
}
SIZES = {"small": 8, "large": 14}
PLACES = {"top left": (0, 0), "top right": (2, 0), "bottom left": (0, 2), "bottom right": (2, 2)}
COUNTS = ("one", "two", "three")
QUESTIONS = ("which shape?", "which colour?", "which size?", "where?", "how many?")
"""In the order of a combination's words."""
PARTS = {
    "train": "for training",
    "val": "for validation, of combinations that are not in training",
    "test": "for the final test, of combinations that are in no other part",
}
SHADE, DARKEST = 20, 60
"""Largest change of a colour's channels, and largest grey of a background."""


class Combination(NamedTuple):
    """What a picture shows: the answers to `QUESTIONS`."""

    shape: str
    colour: str
    size: str
    place: str
    count: str


def combinations(seed: int, held_out: int, for_test: int) -> dict[str, list[Combination]]:
    """The combinations of each part: `held_out` for validation, `for_test` others for tests, the rest for training."""
    every = [Combination(*words) for words in product(SHAPES, COLOURS, SIZES, PLACES, COUNTS)]
    random.Random(f"{seed} combinations").shuffle(every)
    rest = held_out + for_test
    return {"train": every[rest:], "val": every[:held_out], "test": every[held_out:rest]}


def draw(shown: Combination, drawn: random.Random) -> Image.Image:
    """A picture of a combination."""
    grey = drawn.randrange(DARKEST)
    picture = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    pen, size = ImageDraw.Draw(picture), SIZES[shown.size]
    colour = tuple(max(0, min(255, channel + drawn.randint(-SHADE, SHADE))) for channel in COLOURS[shown.colour])
    left, top = PLACES[shown.place]
    cells = [(left + column, top + row) for row in range(2) for column in range(2)]
    for column, row in drawn.sample(cells, COUNTS.index(shown.count) + 1):
        x, y = (cell * CELL + drawn.randint(1, CELL - size) for cell in (column, row))
        draw_shape(pen, shown.shape, x, y, size - 1, colour)
    return picture


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, size: int, colour: tuple[int, ...]) -> None:
    """One shape within a square; `x` and `y` are its left and upper pixels."""
    if shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=colour)
    elif shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=colour)
    elif shape == "triangle":
        pen.polygon(((x, y + size), (x + size, y + size), (x + size // 2, y)), fill=colour)
    else:
        third = size / 3
        pen.rectangle((x + third, y, x + size - third, y + size), fill=colour)
        pen.rectangle((x, y + third, x + size, y + size - third), fill=colour)


def conversation(shown: Combination, drawn: random.Random) -> dict[str, object]:
    """The questions in a random order, with their answers; the first message has the picture."""
    messages: list[dict[str, object]] = []
    for number in drawn.sample(range(len(QUESTIONS)), len(QUESTIONS)):
        question = {"type": "text", "text": QUESTIONS[number]}
        content = [question] if messages else [{"type": "image"}, question]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": shown[number]})
    return {"messages": messages}


def samples(shown: Sequence[Combination], number: int, part: str, seed: int) -> Iterator[tuple[str, bytes, bytes]]:
    """(key, JSON, PNG) of the samples of a part; each combination occurs about equally often."""
    for index in range(number):
        drawn = random.Random(f"{seed} {part} {index}")
        one = shown[index % len(shown)]
        file = io.BytesIO()
        draw(one, drawn).save(file, "PNG")
        yield f"{part}{index:06}", json.dumps(conversation(one, drawn)).encode(), file.getvalue()


def write_tar(path: Path, content: Sequence[tuple[str, bytes, bytes]]) -> None:
    """A tar with these samples; its bytes depend on nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, text, picture in content:
            for name, data in ((f"{key}.json", text), (f"{key}.0.png", picture)):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def write_part(folder: Path, part: str, shown: Sequence[Combination], number: int, tars: int, seed: int) -> None:
    """The tars of a part, with about equally many samples in each."""
    content = list(samples(shown, number, part, seed))
    random.Random(f"{seed} {part}").shuffle(content)
    for index in range(tars):
        write_tar(folder / part / f"{index:04}.tar", content[index::tars])


def write_texts(path: Path) -> None:
    """The texts of all questions and answers, a JSON object each, for `mplug data train-tokenizer`."""
    words = [*QUESTIONS, *SHAPES, *COLOURS, *SIZES, *PLACES, *COUNTS]
    lines = [f"{role}\n{text}\n" for text in words for role in ("user", "assistant")]
    path.write_text("".join(f"{json.dumps({'text': line})}\n" for line in lines * 10), encoding="utf-8")


def prepare(folder: Path) -> None:
    """Index the tars, as `energon prepare` does; a folder of tars is a part."""
    from megatron.energon.tools.prepare import command

    words = ["--non-interactive", "--no-progress", "--num-workers=1", "--force-overwrite"]
    words += [f"--split-parts={part}:{part}/.*" for part in PARTS]
    command.main([str(folder), *words, "--sample-type=CrudeWebdataset"], standalone_mode=False)


def main() -> None:
    """Draw a data set."""
    parser = argparse.ArgumentParser(description="Draw pictures of shapes with questions, as a data set of Energon.")
    parser.add_argument("folder", type=Path)
    for (part, purpose), number in zip(PARTS.items(), (8000, 800, 400), strict=True):
        parser.add_argument(f"--{part}", type=int, default=number, help=f"pictures {purpose}")
    parser.add_argument("--held-out", type=int, default=80, help="combinations that only validation has")
    parser.add_argument("--held-out-test", type=int, default=40, help="combinations that only the test has")
    parser.add_argument("--tars", type=int, default=8, help="tars of each part")
    parser.add_argument("--seed", type=int, default=1234)
    wanted = parser.parse_args()
    shown = combinations(wanted.seed, wanted.held_out, wanted.held_out_test)
    if min(wanted.held_out, wanted.held_out_test) < 1 or not shown["train"]:
        parser.error("--held-out and --held-out-test must be at least 1 and leave combinations for training")
    numbers = {part: getattr(wanted, part) for part in PARTS}
    if min(numbers.values()) < wanted.tars or wanted.tars < 1:
        parser.error("every tar of a part needs at least one picture")
    if wanted.folder.exists():
        parser.error(f"'{wanted.folder}' exists; remove it, or choose another folder")
    for part, number in numbers.items():
        write_part(wanted.folder, part, shown[part], number, wanted.tars, wanted.seed)
    write_texts(wanted.folder / "texts.jsonl")
    prepare(wanted.folder)
    for part, purpose in PARTS.items():
        folder, number = wanted.folder / part, len(shown[part])
        print(f"'{folder}': {numbers[part]} pictures {purpose} ({number} combinations)")


if __name__ == "__main__":
    main()
