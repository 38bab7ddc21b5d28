"""Greedy answers to questions about one picture or several are those of the transformers library, in fp64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")
processors = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")

from llava_models import IMAGE, SIDE, TILED, VIDEO, V, config_of, library_in_fp64, library_of  # noqa: E402
from mplug_generate.command import command  # noqa: E402
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
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<|answer|>"
)
QUESTIONS: list[list[str]] = [["w1 w2 w3"], ["a.png", "w7"], ["w4", "b.png", "w5 w6", "a.png", "w8"], ["b.png"]]
"""Texts and files of pictures."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model, with pictures and a file of questions, and the library's model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiled")
    library = save(library_of(TILED, torch.float32), folder, num_shards=1)
    special = {"<image>": IMAGE, "<video>": VIDEO, "<|user|>": USER, "<|answer|>": ANSWER}
    words = {f"w{number}": number for number in range(V) if number not in special.values()}
    tokenizer = Tokenizer(models.WordLevel({**words, **special}, unk_token="w0"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    generator = torch.Generator().manual_seed(5)
    for name, size in (("a.png", (16, 9)), ("b.png", (19, 20))):
        images.fromarray(torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8).numpy()).save(
            folder / name
        )
    lines = []
    for question in QUESTIONS:
        parts = [{"type": "image", "image": x} if x.endswith("png") else {"type": "text", "text": x} for x in question]
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder, library


def of_library(folder: Path, library: Any, question: Sequence[str]) -> list[int]:
    """The tokens of the library's greedy answer to a question, with pictures as its own processor makes them."""
    files = [folder / part for part in question if part.endswith("png")]
    ours, tokens = TileProcessor(config_of(TILED)), [USER]
    for part in question:
        if part.endswith("png"):
            tokens += ours.prepare(decode_picture((folder / part).read_bytes()), len(files)).tokens
        else:
            tokens += [int(word[1:]) for word in part.split()]
    ids = torch.tensor([[*tokens, ANSWER]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    if files:
        processor = processors.LlavaOnevisionImageProcessorPil(**PREPARATION)
        options |= processor([[images.open(file) for file in files]], return_tensors="pt")
        options["pixel_values"] = options["pixel_values"].double()
    with library_in_fp64(TILED), torch.no_grad():
        found = library.double().generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options)
    answer: list[int] = found[0, ids.shape[1] :].tolist()
    return answer


def test_answers_are_those_of_the_library_together_and_with_a_cache(made: tuple[Path, Any]) -> None:
    folder, library = made
    output = folder / "answers.jsonl"
    words = ["--pretrained", str(folder), "--chat", "--prompts", str(folder / "questions.jsonl"), "--device", "cpu"]
    words += ["--output", str(output), "--tokens", str(TOKENS), "--temperature", "0", "--precision", "fp64"]
    command.main(words, standalone_mode=False)
    found = [json.loads(line)["completion"].strip() for line in output.read_text().splitlines()]
    expected = [of_library(folder, library, question) for question in QUESTIONS]
    assert found == [" ".join(f"w{token}" for token in answer if token < IMAGE) for answer in expected]
    assert len(set(found)) == len(found)
