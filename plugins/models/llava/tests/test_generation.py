"""Greedy answers to questions about one picture or several are those of the transformers library, in fp64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")
processors = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")

from asked_models import (  # noqa: E402
    QUESTIONS,
    answers,
    assert_layout_answers_alike,
    greedy,
    words_of,
    write_picture,
    write_questions,
    write_tokenizer,
)
from llava_models import IMAGE, SIDE, TILED, VIDEO, V, config_of, library_in_fp64, library_of  # noqa: E402
from mplug_llava.processor import TileProcessor  # noqa: E402
from published import save  # noqa: E402

from mplug_nn.pictures import decode_picture  # noqa: E402

PREPARATION: dict[str, Any] = {
    "size": {"height": SIDE, "width": SIDE},
    "image_grid_pinpoints": TILED["image_grid_pinpoints"],
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.3],
}
USER, ANSWER, TOKENS = 59, 60, 10
TEMPLATE = (
    "{% for message in messages %}<|user|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'video' %}<video>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<|answer|>"
)
ASKED = [*QUESTIONS, ["w9", "video", "w5"], ["a.png", "video"]]
"""Texts, files of pictures, and a video."""
FRAMES, CELLS = ("b.png", "c.png", "d.png"), -(-(SIDE // TILED["vision_config"]["patch_size"]) // 2)
"""The frames of the video, and the cells of a frame's side that stand in the text."""


VIDEO_PART = {"type": "video", "video": FRAMES, "fps": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model, with pictures and a file of questions, and the library's model."""
    folder = tmp_path_factory.mktemp("tiled")
    library = save(library_of(TILED, torch.float32), folder, num_shards=1)
    special = {"<image>": IMAGE, "<video>": VIDEO, "<|user|>": USER, "<|answer|>": ANSWER}
    write_tokenizer(folder, V, special, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    write_picture(folder / "a.png", 16, 9)
    for number, frame in enumerate(FRAMES):
        write_picture(folder / frame, 19, 20, seed=number)
    write_questions(folder, ASKED, {"video": VIDEO_PART})
    return folder, library


def of_library(folder: Path, library: Any, question: Sequence[str]) -> list[int]:
    """The tokens of the library's greedy answer to a question, with media as its own processor makes them.

    Pillow resizes the frames of a video: the library's processor of videos needs torchvision.
    """
    files = [folder / part for part in question if part.endswith("png")]
    ours, tokens, videos = TileProcessor(config_of(TILED)), [USER], []
    for part in question:
        if part.endswith("png"):
            tokens += ours.prepare(decode_picture((folder / part).read_bytes()), len(files)).tokens
        elif part == "video":
            tokens += [VIDEO] * (len(FRAMES) * CELLS**2 + 1)
            shown = [images.open(folder / name).resize((SIDE, SIDE), images.Resampling.BICUBIC) for name in FRAMES]
            colours = torch.stack([torch.from_numpy(np.array(frame)) for frame in shown]).float() / 255
            mean, std = (torch.tensor(PREPARATION[name]) for name in ("image_mean", "image_std"))
            videos.append(((colours - mean) / std).permute(0, 3, 1, 2).double())
        else:
            tokens += [int(word[1:]) for word in part.split()]
    ids = torch.tensor([[*tokens, ANSWER]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    if files:
        processor = processors.LlavaOnevisionImageProcessorPil(**PREPARATION)
        options |= processor([[images.open(file) for file in files]], return_tensors="pt")
        options["pixel_values"] = options["pixel_values"].double()
    if videos:
        options["pixel_values_videos"] = torch.stack(videos)
    with library_in_fp64(TILED):
        return greedy(library, ids, TOKENS, options)


def test_answers_are_those_of_the_library_together_and_with_a_cache(made: tuple[Path, Any]) -> None:
    folder, library = made
    expected = [words_of(of_library(folder, library, question), IMAGE) for question in ASKED]
    assert answers(folder, TOKENS, "--chat") == expected


LAYOUTS = [pytest.param(layout, marks=pytest.mark.wide("layouts")) for layout in ("tp2", "pp2")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_writes_the_answers_of_one_process(layout: str, made: tuple[Path, Any]) -> None:
    assert_layout_answers_alike(made[0], TOKENS, layout, "--chat")
