"""Conversations with drawn pictures as samples of data sets, and a tiny model that sees them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mplug import Loader, MicroBatch
from mplug.training.assembly import build_loader
from mplug_testing.harness import tiny_run

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
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (width, height), COLOURS[colour]).save(held, "PNG")
    return held.getvalue()


def asked(content: Any, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def sample(record: Any, *pictures: bytes, **files: bytes) -> dict[str, bytes]:
    numbered = {f"{number}.png": picture for number, picture in enumerate(pictures)}
    return {"json": json.dumps(record).encode(), **numbered, **files}


def pictured(number: int) -> dict[str, bytes]:
    """A question with none to two pictures, which parts mention, or marks in the text of every fourth question."""
    colours = [list(COLOURS)[(number + one) % 3] for one in range(number % 3)]
    content: Any = [{"type": "text", "text": f"{number}:"}, *({"type": "image"} for _ in colours)]
    if number % 4 == 1:
        content = f"{number}:" + "<image>" * len(colours)
    pictures = [drawn(colour, 8 + 4 * (number % 5), 8) for colour in colours]
    return sample(asked(content, " ".join(colours) or "none"), *pictures)


def loader(path: Path, split: str = "train", **changes: Any) -> Loader:
    run = tiny_run({**TINY, "data.path": str(path), **changes})
    run.device = "cpu"
    return build_loader(run, split)


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
