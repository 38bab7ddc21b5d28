"""Preferences keep the contract of data: forms of lines, targets, packing of whole pairs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mplug_preferences.lines import read_preferences
from torch import Tensor

from mplug import DOCUMENTS, IGNORED, REFERENCE, SEQUENCES, UsageError
from mplug.run.prepare import check_data
from mplug.training.assembly import build_loader
from mplug_testing import DataSuite
from mplug_testing.harness import tiny_run

PAIRS = Path(__file__).with_name("pairs.jsonl")
END = 256
TINY: dict[str, Any] = {
    "data.name": "preferences",
    "data.validation_percent": 20,
    "data.max_pairs": 3,
    "trainer.seq_length": 384,
    "kernels.default": None,
}


@pytest.mark.wide("data", tests=["test_it_resumes_exactly"], quick=["validation-(1, 4)"])
class TestPreferences(DataSuite):
    """A run of the objective that takes the data."""

    plugin = "preferences"
    next_tokens = False  # the documents of a sample are answers, each with its prompt
    settings = {**TINY, "data.path": str(PAIRS), "objectives.dpo.loss": "simpo"}
    examples = {
        "validation_path": [str(PAIRS)],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "template": ["llama3"],
        "template_variables": [{"bos_token": "<s>"}],
        "special_tokens": [["<|im_start|>"]],
        "too_long": ["drop"],
        "reference": [True],
    }
    beside = {
        "template_variables": {"data.template": "no-such-file.jinja"},
        "too_long": {"trainer.seq_length": 96},
        "reference": {"objectives.dpo.loss": "sigmoid", "objectives.dpo.reference": "data"},
    }
    without_effect = {"margin": "the tests of objectives/reward train on pairs with margins"}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def batch_of(path: Path, **changes: Any) -> dict[str, Tensor]:
    own = {"data__path": str(path), "data__validation_path": str(path), **changes}
    settings = {**TINY, "trainer.global_batch_size": 1, "trainer.micro_batch_size": 1}
    run = tiny_run(settings | {name.replace("__", "."): value for name, value in own.items()})
    run.device = "cpu"
    check_data(run)
    (batch,) = build_loader(run, "train").take(1)
    return dict(batch)


def documents(batch: dict[str, Tensor]) -> list[tuple[str, str]]:
    """(the text of all tokens and of the last target, the text of the targets) of each answer of a sample."""
    found, place = [], 0
    for number, length in enumerate(batch[DOCUMENTS][0].tolist()):
        own = slice(place, place + length)
        tokens, labels = batch["tokens"][0, own].tolist(), batch["labels"][0, own]
        numbers = batch[SEQUENCES][0, own]
        if length and (labels != IGNORED).any():
            assert (numbers == number).all()
            assert batch["positions"][0, own].tolist() == list(range(length))
            targets = labels[labels != IGNORED].tolist()
            assert tokens[len(tokens) - len(targets) + 1 :] == targets[:-1]
            found.append((text([*tokens, targets[-1]]), text(targets)))
        else:
            assert (numbers == -1).all()
        place += length
    assert place == 384
    return found


def text(tokens: list[int]) -> str:
    special = {END: "<end>", 257: "<|im_start|>", 258: "<|im_end|>"}
    return "".join(special.get(token, chr(token)) for token in tokens)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "texts without a prompt": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
}


@pytest.mark.parametrize("form", FORMS)
def test_texts_follow_their_prompt_and_end(form: str, tmp_path: Path) -> None:
    found = documents(batch_of(written(tmp_path / "a.jsonl", FORMS[form])))
    assert found == [
        ("The sky is blue.<end>", " blue.<end>"),
        ("The sky is green.<end>", " green.<end>"),
    ]


ASKED, GOOD, BAD = said("user", "Sky?"), said("assistant", "Blue"), said("assistant", "Red")
HISTORY = [said("user", "Hi"), said("assistant", "Ho"), ASKED]
MESSAGES: dict[str, dict[str, Any]] = {
    "a prompt of messages": {"prompt": HISTORY, "chosen": [GOOD], "rejected": [BAD]},
    "no prompt": {"chosen": [*HISTORY, GOOD], "rejected": [*HISTORY, BAD]},
    "a text that repeats the prompt": {"prompt": "Sky?", "chosen": [*HISTORY, GOOD], "rejected": [*HISTORY, BAD]},
}


@pytest.mark.parametrize("form", MESSAGES)
def test_of_messages_the_answers_behind_the_prompt_are_targets(form: str, tmp_path: Path) -> None:
    chosen, rejected = documents(batch_of(written(tmp_path / "a.jsonl", MESSAGES[form])))
    before = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n"
    assert chosen == (f"{before}<|im_start|>assistant\nBlue<|im_end|>", "Blue<|im_end|>")
    assert rejected == (f"{before}<|im_start|>assistant\nRed<|im_end|>", "Red<|im_end|>")


def test_a_sample_has_whole_pairs_and_their_reference(tmp_path: Path) -> None:
    lines = [
        {"prompt": f"{n}:", "chosen": "y" * n, "rejected": "n", "ref_chosen_logps": -n, "ref_rejected_logps": -0.5}
        for n in range(1, 3)
    ]
    batch = batch_of(written(tmp_path / "a.jsonl", *lines), data__reference=True, objectives__dpo__reference="data")
    texts = [targets for _, targets in documents(batch)]
    assert texts == ["yy<end>", "n<end>", "y<end>", "n<end>"]
    numbers = batch[SEQUENCES][0]
    sums = [float(batch[REFERENCE][0][numbers == number].sum()) for number in range(4)]
    assert sums == [-2.0, -0.5, -1.0, -0.5]


def test_long_answers_lose_their_end_or_the_pair_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "p", "chosen": "c" * 500, "rejected": "r" * 9})
    batch = batch_of(path)
    lengths = batch[DOCUMENTS][0].tolist()
    assert lengths[:3] == [374, 10, 0]
    with pytest.raises(UsageError, match="1 too long"):
        batch_of(path, data__too_long="drop")


def test_pairs_that_teach_nothing_are_omitted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "p", "chosen": "c", "rejected": "c"},
                   {"prompt": [ASKED], "chosen": [said("assistant", "<|im_end|>")], "rejected": [BAD]})  # fmt: skip
    with pytest.raises(UsageError, match=r"2 read; .* 1 with a special token in their text, 1 with equal answers"):
        batch_of(path)


WRONG: dict[str, Any] = {
    "has no 'rejected'; write each line as": {"prompt": "a", "chosen": "b"},
    "has no 'chosen'": ["a", "b"],
    "has a value of type int as 'chosen'": {"chosen": 1, "rejected": "b"},
    "has a text and a list of messages": {"chosen": "a", "rejected": [BAD]},
    "message 1 of 'chosen', has no string 'role'": {"chosen": [{"content": "a"}], "rejected": [BAD]},
    "has a 'prompt' of type int": {"prompt": 3, "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_line_is_refused_with_its_place(sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", FORMS["texts"], WRONG[sentence])
    with pytest.raises(UsageError, match=rf"a\.jsonl:2.* {sentence}|a\.jsonl:2, {sentence}"):
        list(read_preferences([path]))


def test_a_line_without_the_reference_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", FORMS["texts"])
    with pytest.raises(UsageError, match=r"has no number 'ref_chosen_logps', which data\.reference=true reads"):
        list(read_preferences([path], numbers=[REFERENCE]))


def test_equal_prompts_are_in_one_split(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n % 40}", "chosen": f"a{n}", "rejected": "b"} for n in range(120)]
    pairs = list(read_preferences([written(tmp_path / "a.jsonl", *lines)]))
    held_out = {pair.prompt: pair.held_out(30) for pair in pairs}
    assert all(pair.held_out(30) == held_out[pair.prompt] for pair in pairs)
    assert 0 < sum(held_out.values()) < len(held_out)
    assert torch.is_tensor(batch_of(tmp_path / "a.jsonl")["tokens"])
