"""The scripts in docs/recipes: the drawn data set, and the count of right answers."""

import importlib.util
import json
import random
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mplug import IGNORED

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shapes() -> ModuleType:
    pytest.importorskip("PIL")
    return script("draw_shapes")


def content_of(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        return {one.name: opened.extractfile(one).read() for one in opened}  # type: ignore[union-attr]


def write(shapes: ModuleType, folder: Path, seed: int = 1) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    seen, held_out = shapes.combinations(seed, 80)
    shapes.write_part(folder, "train", seen, 40, 2, seed)
    shapes.write_part(folder, "val", held_out, 16, 2, seed)
    return seen, held_out


def test_a_seed_determines_every_byte_of_the_drawn_tars(shapes: ModuleType, tmp_path: Path) -> None:
    write(shapes, tmp_path / "one")
    write(shapes, tmp_path / "same")
    write(shapes, tmp_path / "other", seed=2)
    tars = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").glob("*/*.tar"))
    assert len(tars) == 4
    for tar in tars:
        data = (tmp_path / "one" / tar).read_bytes()
        assert data == (tmp_path / "same" / tar).read_bytes()
        assert data != (tmp_path / "other" / tar).read_bytes()


def test_no_picture_for_training_shows_a_combination_of_validation(shapes: ModuleType, tmp_path: Path) -> None:
    write(shapes, tmp_path)
    drawn: dict[str, set[tuple[str, ...]]] = {}
    for part in ("train", "val"):
        samples = [text for tar in (tmp_path / part).glob("*.tar") for text in content_of(tar).items()]
        drawn[part] = set()
        for name, data in samples:
            if name.endswith(".json"):
                messages = json.loads(data)["messages"]
                asked = [message["content"][-1]["text"] for message in messages[::2]]
                answered = dict(zip(asked, (message["content"] for message in messages[1::2]), strict=True))
                drawn[part].add(tuple(answered[question] for question in shapes.QUESTIONS))
                assert [part["type"] for message in messages[::2] for part in message["content"]].count("image") == 1
    assert len(drawn["train"]) == 40
    assert len(drawn["val"]) == 16
    assert not drawn["train"] & drawn["val"]


def test_a_picture_shows_its_combination(shapes: ModuleType) -> None:
    for number, shown in enumerate(shapes.combinations(1, 80)[0]):
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
    answers_of = script("answers").answers_of
    tokens = [9, 50, 50, 1, 2, 30, 31, 8, 1, 3, 40, 8]
    labels = [IGNORED] * 4 + [30, 31, 8] + [IGNORED] * 2 + [40, 8, IGNORED]
    first, second = answers_of(tokens, labels, frozenset({50}))
    assert (first.question, first.tokens, first.place) == ((1, 2), (30, 31, 8), slice(4, 7))
    assert (second.question, second.tokens, second.place) == ((1, 3), (40, 8), slice(9, 11))
