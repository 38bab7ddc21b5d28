"""Folders of models that answer questions about pictures, and what `mplug generate` writes for them, token by token."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mplug_generate.command import command

QUESTIONS: list[list[str]] = [["w1 w2 w3"], ["a.png", "w7"], ["w4", "b.png", "w5 w6", "a.png", "w8"], ["b.png"]]
"""Texts and files of pictures."""


def write_tokenizer(folder: Path, vocabulary: int, special: Mapping[str, int], template: str) -> None:
    """A tokenizer whose words are 'w0', 'w1' and so on, so that an answer shows its tokens, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(vocabulary) if number not in special.values()}
    tokenizer = Tokenizer(models.WordLevel({**words, **special}, unk_token="w0"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def write_picture(path: Path, height: int, width: int, seed: int = 5) -> None:
    """A picture of random colours."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(colours.numpy()).save(path)


def write_questions(folder: Path, questions: Sequence[Sequence[str]], others: Mapping[str, Any] | None = None) -> None:
    """The file of questions. `others` are words that stand for another part than text or a picture."""
    parts = dict[str, Any](others or {})

    def part_of(word: str) -> Any:
        return parts.get(word) or (
            {"type": "image", "image": word} if word.endswith("png") else {"type": "text", "text": word}
        )

    lines = [{"messages": [{"role": "user", "content": [*map(part_of, words)]}]} for words in questions]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))


def answers(folder: Path, tokens: int, *options: str, file: str = "questions.jsonl") -> list[str]:
    """What the command writes for a file of questions, greedily and in fp64."""
    output = folder / "answers.jsonl"
    words = ["--pretrained", str(folder), "--prompts", str(folder / file), "--device", "cpu"]
    words += ["--output", str(output), "--tokens", str(tokens), "--temperature", "0", "--precision", "fp64"]
    command.main([*words, *options], standalone_mode=False)
    return [json.loads(line)["completion"].strip() for line in output.read_text().splitlines()]


def words_of(tokens: Sequence[int], end: int) -> str:
    """The words of an answer; tokens from `end` on have none."""
    return " ".join(f"w{token}" for token in tokens if token < end)


def greedy(library: Any, ids: torch.Tensor, number: int, options: Mapping[str, Any]) -> list[int]:
    """The tokens of the library's greedy answer to `ids` [1, S], in fp64."""
    with torch.no_grad():
        found = library.double().generate(ids, max_new_tokens=number, do_sample=False, pad_token_id=0, **options)
    answer: list[int] = found[0, ids.shape[1] :].tolist()
    return answer


def assert_layout_answers_alike(folder: Path, tokens: int, layout: str, *options: str) -> None:
    """The answers of one process, in one batch and each alone: then a batch has no picture at all."""
    expected = answers(folder, tokens, *options)
    assert answers(folder, tokens, *options, "--parallel", layout) == expected
    assert answers(folder, tokens, *options, "--parallel", layout, "--batch-size", "1") == expected
