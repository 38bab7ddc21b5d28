"""The scripts in docs/recipes: the drawn data set, the count of right answers, and keys in long texts."""

import base64
import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scripts import script

from mplug import IGNORED

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
VISION = (
    "--recipe",
    "vision",
    "--set",
    "data.path=shapes",
    "--set",
    "data.tokenizer_options.path=shapes/tokenizer.json",
)


@pytest.fixture
def shapes() -> ModuleType:
    pytest.importorskip("PIL")
    return script("docs/recipes/draw_shapes.py")


def content_of(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        return {one.name: opened.extractfile(one).read() for one in opened}  # type: ignore[union-attr]


NUMBERS = {"train": 40, "val": 16, "test": 10}
"""Pictures of each part that the tests draw."""


def write(shapes: ModuleType, folder: Path, seed: int = 1) -> None:
    shown = shapes.combinations(seed, 80, 40)
    for part, number in NUMBERS.items():
        shapes.write_part(folder, part, shown[part], number, 2, seed)


def test_a_seed_determines_every_byte_of_the_drawn_tars(shapes: ModuleType, tmp_path: Path) -> None:
    write(shapes, tmp_path / "one")
    write(shapes, tmp_path / "same")
    write(shapes, tmp_path / "other", seed=2)
    tars = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").glob("*/*.tar"))
    assert len(tars) == 6
    for tar in tars:
        data = (tmp_path / "one" / tar).read_bytes()
        assert data == (tmp_path / "same" / tar).read_bytes()
        assert data != (tmp_path / "other" / tar).read_bytes()


def test_no_combination_is_in_the_pictures_of_two_parts(shapes: ModuleType, tmp_path: Path) -> None:
    write(shapes, tmp_path)
    drawn: dict[str, set[tuple[str, ...]]] = {}
    for part in NUMBERS:
        samples = [text for tar in (tmp_path / part).glob("*.tar") for text in content_of(tar).items()]
        drawn[part] = set()
        for name, data in samples:
            if name.endswith(".json"):
                messages = json.loads(data)["messages"]
                asked = [message["content"][-1]["text"] for message in messages[::2]]
                answered = dict(zip(asked, (message["content"] for message in messages[1::2]), strict=True))
                drawn[part].add(tuple(answered[question] for question in shapes.QUESTIONS))
                assert [part["type"] for message in messages[::2] for part in message["content"]].count("image") == 1
    assert {part: len(combinations) for part, combinations in drawn.items()} == NUMBERS
    assert len(set.union(*drawn.values())) == sum(NUMBERS.values())


def test_a_picture_shows_its_combination(shapes: ModuleType) -> None:
    for number, shown in enumerate(shapes.combinations(1, 80, 40)["train"]):
        pixels = np.array(shapes.draw(shown, random.Random(number))).astype(int)
        left, top = (cells * shapes.CELL for cells in shapes.PLACES[shown.place])
        background = pixels[63 - top - 31, 63 - left - 31]  # a pixel of the opposite quarter
        rows, columns = (pixels != background).any(axis=2).nonzero()
        assert rows.min() >= top
        assert rows.max() < top + 2 * shapes.CELL
        assert columns.min() >= left
        assert columns.max() < left + 2 * shapes.CELL
        cells = {(row // shapes.CELL, column // shapes.CELL) for row, column in zip(rows, columns, strict=True)}
        assert len(cells) == 1 + shapes.COUNTS.index(shown.count)
        mean = pixels[rows, columns].mean(axis=0)
        nearest = min(shapes.COLOURS, key=lambda name: abs(mean - shapes.COLOURS[name]).sum())
        assert nearest == shown.colour


def test_answers_are_the_rows_of_targets_and_know_their_questions() -> None:
    answers_of = script("docs/recipes/answers.py").answers_of
    tokens = [9, 50, 50, 1, 2, 30, 31, 8, 1, 3, 40, 8]
    labels = [IGNORED] * 4 + [30, 31, 8] + [IGNORED] * 2 + [40, 8, IGNORED]
    first, second = answers_of(tokens, labels, frozenset({50}))
    assert (first.question, first.tokens, first.place) == ((1, 2), (30, 31, 8), slice(4, 7))
    assert (second.question, second.tokens, second.place) == ((1, 3), (40, 8), slice(9, 11))


def marked(conversation: dict[str, list[dict[str, str]]]) -> str:
    """A conversation in chatml by hand; a mark is one letter, as it is one token."""
    return "".join(f"<{one['role']}\n{one['content']}>\n" for one in conversation["messages"])


@pytest.mark.parametrize("length", [64, 128, 1024])
@pytest.mark.parametrize(("depth", "before"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_a_text_has_its_length_and_its_key_once_at_the_depth(length: int, depth: float, before: float) -> None:
    needles = script("docs/recipes/needles.py")
    draw = random.Random(1)
    for _ in range(20):
        sample = needles.conversation(draw, length, depth)
        text, key = (one["content"] for one in sample["messages"])
        assert length - 30 <= len(marked(sample)) + 1 <= length  # with the token that ends a document
        assert text.count(key) == 1
        haystack = len(text) - len(needles.NEEDLE.format(key)) - len(needles.QUESTION)
        assert abs(text.index("The key is") - before * haystack) <= 50
        assert text.endswith(needles.QUESTION)


def test_keys_to_measure_are_not_those_of_the_training(tmp_path: Path) -> None:
    needles = script("docs/recipes/needles.py")
    trained = [json.dumps(one) for one in needles.conversations("train 1", 128, 50)]
    draw = random.Random("measure 128")
    measured = {json.dumps(needles.conversation(draw, 128, 0.5)) for _ in range(50)}
    assert len({*trained}) == 50
    assert not measured & {*trained}


def call(folder: Path, *words: object) -> str:
    finished = subprocess.run([sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.wide("session")
def test_the_session_of_the_page_of_vision_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.energon")
    pytest.importorskip("tokenizers")
    image = pytest.importorskip("PIL.Image")
    call(tmp_path, RECIPES / "draw_shapes.py", "shapes", "--train", 32, "--val", 16, "--test", 8)
    words = ["--vocab-size", 353, "--output", "shapes/tokenizer.json"]
    words += [word for name in ("endoftext", "im_start", "im_end") for word in ("--special", f"<|{name}|>")]
    told = call(tmp_path, "-m", "mplug", "data", "train-tokenizer", "shapes/texts.jsonl", *words)
    assert "353 tokens" in told
    assert "no more pairs" not in told
    call(tmp_path, "-m", "mplug", "data", "look", *VISION, "--samples", 16, "--split", "validation")
    page = (tmp_path / "samples.html").read_text()
    sources = [part.partition('"')[0] for part in page.split('src="data:image/png;base64,')[1:]]
    shown = {image.open(io.BytesIO(base64.b64decode(source))).convert("RGB").tobytes() for source in sources}
    files = [data for tar in (tmp_path / "shapes" / "val").glob("*.tar") for data in content_of(tar).values()]
    pictures = {image.open(io.BytesIO(data)).tobytes() for data in files if data.startswith(b"\x89PNG")}
    assert len(pictures) == 16
    assert len(shown) >= 8  # the loader draws from a buffer that it refills, so a picture may come again before others
    assert shown <= pictures  # they keep their size, so the model receives every pixel
    call(tmp_path, "-m", "mplug", "train", *VISION, "--name", "shapes", "--set", "trainer.steps=2")
    counted = call(tmp_path, RECIPES / "answers.py", "--name", "shapes", "--samples", 16, "--picture", "answers.png")
    lines = counted.splitlines()
    tested = call(tmp_path, RECIPES / "answers.py", "--name", "shapes", "--part", "test", "--samples", 8).splitlines()
    assert 4 * 5 <= int(tested[-1].split()[1]) <= 8 * 5
    answered = image.open(tmp_path / "answers.png")
    enlarged = {image.open(io.BytesIO(data)).resize((128, 128), 0).tobytes() for data in files if data[1:4] == b"PNG"}
    assert answered.crop((4, 4, 132, 132)).tobytes() in enlarged
    assert lines[-1].split()[0] == "all"
    assert 8 * 5 <= int(lines[-1].split()[1]) <= 16 * 5
    assert {line.partition("|")[0].strip() for line in lines[1:-1]} == {
        f"user {question} assistant" for question in script("docs/recipes/draw_shapes.py").QUESTIONS
    }
