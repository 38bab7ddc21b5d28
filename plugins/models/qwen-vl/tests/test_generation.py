"""Greedy answers to questions about pictures are those of the transformers library, token by token in fp64."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")
processors = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

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
from beside_library import changed, seeing_library  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from mplug_generate.command import command  # noqa: E402
from mplug_huggingface_format.model_config import settings_of  # noqa: E402
from mplug_qwen_vl import QwenVL  # noqa: E402
from mplug_qwen_vl.processor import VisionProcessor  # noqa: E402
from mplug_qwen_vl.vision import VisionConfig  # noqa: E402
from published import rewritten, save  # noqa: E402
from seeing_models import CONFIGS, END, IMAGE, START, VIDEO, V, library_in_fp64  # noqa: E402

from mplug import UsageError  # noqa: E402
from mplug_nn.pictures import decode_picture  # noqa: E402

PREPARATION = {
    "patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 400},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.3],
}
SPECIAL = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
USER, ANSWER = 59, 60
TEMPLATE = (
    "{% for message in messages %}<|user|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<|answer|>"
)
TOKENS, RATE = 12, 4.0


@pytest.fixture(scope="module", params=["2.5", "3", pytest.param("3-moe", marks=pytest.mark.wide("families"))])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A kind, the folder of a model, with pictures and a file of questions, and the library's model."""
    folder, kind = tmp_path_factory.mktemp("seeing"), request.param
    given = changed(CONFIGS[kind], {"text_config.eos_token_id": None})
    library = save(seeing_library(given, experts_implementation="eager"), folder, num_shards=1)
    with torch.no_grad():  # other activations then give other tokens
        for parameter in library.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    library.save_pretrained(folder)
    if kind == "3-moe":  # the library saves experts in its own order, and reads that of the released folders too
        rewritten(
            folder, lambda found: found.update({n: x.mT.contiguous() for n, x in found.items() if ".experts." in n})
        )
    write_tokenizer(folder, V, {**SPECIAL, "<|user|>": USER, "<|answer|>": ANSWER}, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**PREPARATION, "image_processor_type": "Qwen2VLImageProcessor"})
    )
    write_picture(folder / "a.png", 9, 16)
    write_picture(folder / "b.png", 21, 8)
    write_questions(folder, QUESTIONS)
    return kind, folder, library


def of_library(kind: str, folder: Path, library: Any, question: Sequence[str]) -> list[int]:
    """The tokens of the library's greedy answer to a question, with pictures as its own processor makes them."""
    processor = processors.Qwen2VLImageProcessorPil(**PREPARATION)
    tokens, grids, pixels = [USER], [], []
    for part in question:
        if part.endswith("png"):
            made = processor(images.open(folder / part).convert("RGB"), return_tensors="pt")
            grids.append(made["image_grid_thw"])
            pixels.append(made["pixel_values"].double())
            tokens += [START, *[IMAGE] * (int(grids[-1].prod()) // 4), END]
        else:
            tokens += [int(word[1:]) for word in part.split()]
    ids = torch.tensor([[*tokens, ANSWER]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
    if grids:
        options |= {"image_grid_thw": torch.cat(grids), "pixel_values": torch.cat(pixels)}
    with library_in_fp64(CONFIGS[kind]):
        return greedy(library, ids, TOKENS, options)


def refused(folder: Path, *options: str) -> str:
    """The sentence with which the command refuses a question."""
    words = ["--pretrained", str(folder), "--device", "cpu", "--tokens", "4", *options]
    with pytest.raises(UsageError) as found:
        command.main(words, standalone_mode=False)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.wide("families", quick=["3"])
def test_greedy_answers_are_those_of_the_library(made: tuple[str, Path, Any]) -> None:
    """Questions of different lengths with none, one and two pictures in one batch; then two at a time."""
    kind, folder, library = made
    expected = [words_of(of_library(kind, folder, library, question), IMAGE) for question in QUESTIONS]
    assert len(set(" ".join(expected).split())) > 8
    assert answers(folder, TOKENS, "--chat") == expected
    assert answers(folder, TOKENS, "--chat", "--batch-size", "2") == expected


WIDE = pytest.mark.wide("layouts")
DIVIDED = [("3", "tp2"), *(pytest.param(kind, one, marks=WIDE) for kind in ("2.5", "3-moe") for one in ("tp2", "pp2"))]


@pytest.mark.parametrize(("made", "layout"), [*DIVIDED, pytest.param("3", "pp2", marks=WIDE)], indirect=["made"])
@pytest.mark.wide("families")
def test_a_layout_writes_the_answers_of_one_process(layout: str, made: tuple[str, Path, Any]) -> None:
    assert_layout_answers_alike(made[1], TOKENS, layout, "--chat")


def of_library_about_videos(kind: str, folder: Path, library: Any, parts: Sequence[str | list[Path]]) -> list[int]:
    """The library's greedy answer to text and videos, whose patches and tokens test_videos.py compares with its own."""
    vision, tokens, grids, pixels = vision_of(folder), [USER], [], []
    for part in parts:
        if isinstance(part, str):
            tokens += [int(word[1:]) for word in part.split()]
            continue
        frames = torch.cat([decode_picture(path.read_bytes()) for path in part])
        medium = VisionProcessor(vision).prepare_video(frames, RATE, lambda text: [0] * len(text.split()))
        tokens += medium.tokens
        grids.append(medium.values[0])
        pixels.append(medium.values[1].double())
    ids = torch.tensor([[*tokens, ANSWER]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "video_grid_thw": torch.tensor([grid[:3] for grid in grids]),
        "pixel_values_videos": torch.cat(pixels),
    }
    if kind == "2.5":
        options["second_per_grid_ts"] = torch.tensor([grid.seconds for grid in grids])
    with library_in_fp64(CONFIGS[kind]):
        return greedy(library, ids, TOKENS, options)


def vision_of(folder: Path) -> VisionConfig:
    """The tower of a folder, with the processor's settings."""
    found = settings_of(QwenVL, folder / "config.json")
    assert found is not None
    return VisionConfig(**found.altering["vision"])


@pytest.mark.wide("families")
def test_greedy_answers_about_videos_are_those_of_the_library(made: tuple[str, Path, Any]) -> None:
    """A folder of frames on the command line, and lists of frames in a file of questions."""
    kind, folder, library = made
    frames = folder / "frames"
    frames.mkdir()
    for number in range(5):
        write_picture(frames / f"{number}.png", 12, 9)
    files, some = [frames / f"{number}.png" for number in range(5)], [frames / "1.png", frames / "0.png"]
    expected = [
        words_of(of_library_about_videos(kind, folder, library, parts), IMAGE)
        for parts in ([files, "w7"], ["w2", some, "w3"])
    ]
    parts = [{"type": "video", "video": [f"frames/{path.name}" for path in own], "fps": RATE} for own in (files, some)]
    texts = [{"type": "text", "text": f"w{number}"} for number in (7, 2, 3)]
    lines = [[parts[0], texts[0]], [texts[1], parts[1], texts[2]]]
    (folder / "videos.jsonl").write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    assert answers(folder, TOKENS, "--chat", file="videos.jsonl") == expected
    words = ["--pretrained", str(folder), "--chat", "--video", str(frames), "--fps", str(RATE), "--prompt", "w7"]
    words += ["--device", "cpu", "--tokens", str(TOKENS), "--temperature", "0", "--precision", "fp64"]
    shown = CliRunner().invoke(command, words)
    assert (shown.exit_code, shown.stdout.strip()) == (0, expected[0]), shown.output
    assert "--video and --fps belong together" in refused(folder, "--video", str(frames))


@pytest.mark.wide("families")
def test_what_cannot_be_asked_is_refused_with_a_sentence(made: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, _ = made
    a, chat = ("--image", str(folder / "a.png")), ("--chat", "--prompt", "w1")
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes((folder / "a.png").read_bytes()[:90])
    assert f"the image '{damaged}' cannot be used: the picture is damaged" in refused(
        folder, "--image", str(damaged), *chat
    )
    text = refused(folder, "--image", str(folder / "config.json"), *chat)
    assert "cannot be used: the bytes are no picture in a format that Pillow reads; use another image" in text
    assert "--prompt has 1 image, and its text has the marks of 0; add --chat" in refused(folder, *a, "--prompt", "w1")
    assert "stands for a part of an image; remove it" in refused(
        folder, *a, "--prompt", "<|vision_start|> <|image_pad|> <|vision_end|> <|image_pad|>"
    )
    large = [*(a * 12), *chat, "--tokens", "40"]
    assert "--tokens adds 40, and texts with images may have 128, because" in refused(folder, *large)
    assert "--image belongs to --prompt" in refused(folder, *a, "--prompts", str(folder / "questions.jsonl"))
    (tmp_path / "some.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]})
    )
    text = refused(folder, "--chat", "--prompts", str(tmp_path / "some.jsonl"))
    assert f"line 1: the image '{tmp_path / 'none.png'}' cannot be used: No such file or directory" in text
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content[1].text }}"}))
    text = refused(other, *a, *chat)
    assert "--prompt has 1 image, and the chat template of the folder writes 0 of the marks" in text


def test_a_preprocessor_config_that_the_family_does_not_follow_is_refused(
    made: tuple[str, Path, Any], tmp_path: Path
) -> None:
    other = shutil.copytree(made[1], tmp_path / "other")
    for fields, sentence in (
        ({"patch_size": 14}, "has 14 for 'model.vision.patch_size', which is 2 by another file"),
        ({"resample": 2}, "its field 'resample' is 2, but the family supports 3 only"),
        ({"do_pad": True}, "'do_pad' is true"),
        ({"image_mean": [1]}, "its field 'image_mean' is [1], but must be a list of three numbers"),
        ({"sizes": 1}, "its field 'sizes' is unknown"),
    ):
        (other / "preprocessor_config.json").write_text(json.dumps({**PREPARATION, **fields}))
        assert sentence in refused(other, "--prompt", "w1")
