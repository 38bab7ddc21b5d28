"""Conversations with pictures: their tokens, targets and pictures, packed and alone, and what cannot be used."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mplug import Loader, MicroBatch
from mplug.training.assembly import build_loader
from mplug_testing.harness import tiny_run

pytest.importorskip("mplug_qwen_vl")
Image = pytest.importorskip("PIL.Image")
S = 96
IMAGE, VIDEO, START, END = 300, 301, 302, 303
IM_START, IM_END = 257, 258
VISION = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 16,
    "patch_size": 4,
    "patch_frames": 2,
    "position_grid": 4,
    "min_pixels": 64,
    "max_pixels": 1024,
    "deepstack_blocks": [0],
    "image_token": IMAGE,
    "video_token": VIDEO,
    "start_token": START,
    "end_token": END,
}
TINY: dict[str, Any] = {
    "model.name": "qwen-vl",
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_hidden_size": 32,
    "model.vocab_size": 304,
    "model.rope_division": "alternating",
    "model.rope_sections": [4, 2, 2],
    "model.vision": VISION,
    "data.name": "energon",
    "data.task_encoder": "conversations",
    "data.streams": 2,
    "data.shuffle_buffer_size": 8,
    "trainer.seq_length": S,
}
PACKED = {"data.packing_buffer_size": 12, "data.max_documents": 8, "kernels.default": None}
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def drawn(colour: str, width: int = 8, height: int = 8) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (width, height), COLOURS[colour]).save(held, "PNG")
    return held.getvalue()


def asked(content: Any, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def sample(record: Any, *pictures: bytes, **files: bytes) -> dict[str, bytes]:
    numbered = {f"{number}.png": picture for number, picture in enumerate(pictures)}
    return {"json": json.dumps(record).encode(), **numbered, **files}


def pictured(number: int) -> dict[str, bytes]:
    """A question with none to two pictures before, between or behind its words."""
    colours = [list(COLOURS)[(number + one) % 3] for one in range(number % 3)]
    parts: list[Any] = [{"type": "text", "text": f"{number}:"}, *({"type": "image"} for _ in colours)]
    pictures = [drawn(colour, 8 + 4 * (number % 5), 8) for colour in colours]
    return sample(asked(parts, " ".join(colours) or "none"), *pictures)


def loader(path: Path, split: str = "train", **changes: Any) -> Loader:
    run = tiny_run({**TINY, "data.path": str(path), **changes})
    run.device = "cpu"
    return build_loader(run, split)


Prepare = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, prepare: Prepare) -> Callable[..., Path]:
    """A data set of these samples; a stream of it repeats them."""

    def make(*samples: dict[str, bytes]) -> Path:
        named = {f"k{number}": files for number, files in enumerate(samples)}
        return prepare(tmp_path / "set", {"train": [named]}, "CrudeWebdataset")

    return make


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory, prepare: Prepare) -> Path:
    parts = {
        "train": [{f"a{n:02}": pictured(n) for n in range(20)}, {f"b{n:02}": pictured(20 + n) for n in range(20)}],
        "val": [{f"c{n:02}": pictured(40 + n) for n in range(20)}],
    }
    return prepare(tmp_path_factory.mktemp("sets") / "conversations", parts, "CrudeWebdataset")


def first(path: Path, count: int = 1, **changes: Any) -> MicroBatch:
    own = {"data.streams": 1, "trainer.micro_batch_size": count}
    return next(loader(path, **{**own, **changes}).take(count))


def chatml(*turns: tuple[str, Sequence[int]]) -> list[int]:
    tokens: list[int] = []
    for role, content in turns:
        tokens += [IM_START, *f"{role}\n".encode(), *content, IM_END, *b"\n"]
    return tokens


def of_picture(tokens: int) -> list[int]:
    return [START, *[IMAGE] * tokens, END]


def targets(batch: MicroBatch, row: int = 0) -> list[int]:
    return [label for label in batch["labels"][row].tolist() if label >= 0]


# Tokens, targets and pictures.


def test_pictures_stand_where_the_parts_mention_them_and_only_answers_are_targets(made: Callable[..., Path]) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    batch = first(made(sample(asked(parts, "red blue"), drawn("red"), drawn("blue", 16, 8))))
    question = [*of_picture(1), *b"and", *of_picture(2), *b"?"]
    expected = chatml(("user", question), ("assistant", b"red blue"))
    tokens = batch["tokens"][0].tolist()
    assert tokens[: len(expected)] == expected
    assert set(tokens[len(expected) :]) == {256}
    assert targets(batch) == [*b"red blue", IM_END]
    assert batch["patch_lengths"].tolist() == [[4, 8]]
    assert [row for row in batch["vision_rows"][0].tolist() if row >= 0] == [0, 1, 2]
    assert batch["vision_rows"][0].tolist().index(0) == tokens.index(IMAGE)
    colours = batch["patches"][0].view(12, 3, -1).mean(-1)  # the channel with the largest mean
    assert colours[:4].argmax(1).tolist() == [0] * 4
    assert colours[4:].argmax(1).tolist() == [2] * 8
