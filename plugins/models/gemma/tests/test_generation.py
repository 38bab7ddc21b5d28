"""Greedy answers to questions about pictures are those of the transformers library, token by token in fp64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")
processors = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")

from asked_models import (  # noqa: E402
    QUESTIONS,
    answers,
    assert_layout_answers_alike,
    greedy,
    write_picture,
    write_questions,
    write_tokenizer,
)
from beside_library import seeing_library  # noqa: E402
from library_models import wide  # noqa: E402
from published import save  # noqa: E402
from seeing_gemma import CONFIG, END, IMAGE, START, TOWER, V  # noqa: E402

SIDE, TOKENS_OF_IMAGE = TOWER["image_size"], CONFIG["mm_tokens_per_image"]
PREPARATION: dict[str, Any] = {
    "size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.3],
}
BLANK, USER, ANSWER, TOKENS = 58, 59, 60, 10
TEMPLATE = (
    "{% for message in messages %}<|user|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|start|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<|answer|>"
)
OPTIONS = ("--chat", "--set", f"model.vision.blank_line_token={BLANK}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model, with pictures and a file of questions, and the library's model."""
    folder = tmp_path_factory.mktemp("gemma3")
    library = save(seeing_library(CONFIG), folder, num_shards=1)
    special = {"<|image|>": IMAGE, "<|start|>": START, "<|end|>": END, "<|user|>": USER, "<|answer|>": ANSWER}
    write_tokenizer(folder, V, special, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    write_picture(folder / "a.png", 16, 9, seed=2)
    write_picture(folder / "b.png", 19, 20, seed=12)
    write_questions(folder, QUESTIONS)
    return folder, library


def of_library(folder: Path, library: Any, question: Sequence[str]) -> list[int]:
    """The tokens of the library's greedy answer to a question, with pictures as its own processor makes them."""
    tokens, pictures = [USER], []
    for part in question:
        if part.endswith("png"):
            tokens += [BLANK, START, *[IMAGE] * TOKENS_OF_IMAGE, END, BLANK]
            pictures.append(images.open(folder / part).convert("RGB"))
        else:
            tokens += [int(word[1:]) for word in part.split()]
    ids = torch.tensor([[*tokens, ANSWER]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "token_type_ids": (ids == IMAGE).long()}
    if pictures:
        made = processors.Gemma3ImageProcessorPil(**PREPARATION)(pictures, return_tensors="pt")
        options["pixel_values"] = made["pixel_values"].double()
    with wide("gemma3"):
        return greedy(library, ids, TOKENS, options)


@pytest.mark.wide("families")
def test_greedy_answers_are_those_of_the_library(made: tuple[Path, Any]) -> None:
    """Questions of different lengths with none, one and two pictures in one batch; then two at a time."""
    folder, library = made
    found = [of_library(folder, library, question) for question in QUESTIONS]
    expected = [" ".join(f"w{token}" for token in answer if token < IMAGE or token == BLANK) for answer in found]
    assert len(set(" ".join(expected).split())) > 6
    assert answers(folder, TOKENS, *OPTIONS) == expected
    assert answers(folder, TOKENS, *OPTIONS, "--batch-size", "2") == expected


LAYOUTS = [pytest.param(layout, marks=pytest.mark.wide("layouts")) for layout in ("tp2", "pp2")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_writes_the_answers_of_one_process(layout: str, made: tuple[Path, Any]) -> None:
    assert_layout_answers_alike(made[0], TOKENS, layout, *OPTIONS)
