"""Texts with labels: from lines to micro batches, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mplug import IGNORED, UsageError
from mplug.training.assembly import build_loader
from mplug_testing import DataSuite
from mplug_testing.harness import tiny_run

LINES = Path(__file__).with_name("lines.jsonl")
S = 32
MODEL = {
    "model.name": "modernbert",
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 300,
    "model.window": 3,
}
TEXTS: dict[str, Any] = {
    "data.name": "labelled",
    "data.validation_percent": 20,
    "data.max_documents": 6,
    "data.begin_token": 257,
    "trainer.seq_length": S,
    "kernels.default": None,
    **MODEL,
    "model.head": "sequences",
    "model.labels": ["even", "odd"],
}


class TestLabelled(DataSuite):
    plugin = "labelled"
    next_tokens = False
    settings = {**TEXTS, "data.path": str(LINES)}
    examples = {
        "validation_path": [str(LINES)],
        "form": ["words"],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "begin_token": [259],
        "end_token": [258],
    }
    without_effect = {"label_at": "the tests of objectives/classify train decoders whose label is at the last token"}


def batch_of(path: Path, *lines: Any, **changes: Any) -> dict[str, Any]:
    """The first micro batch of a file with these lines, which both splits read."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    own = {"data.path": str(path), "data.validation_path": str(path), **changes}
    run = tiny_run({**TEXTS, **{name.replace("__", "."): value for name, value in own.items()}})
    run.device = "cpu"
    return dict(next(iter(build_loader(run, "train").take(1))))


def documents(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of the documents of the first sample, without the filler."""
    found, place = [], 0
    for length in batch["document_lengths"][0].tolist():
        part = slice(place, place + length)
        found.append((batch["tokens"][0, part].tolist(), batch["labels"][0, part].tolist()))
        place += length
    return [one for one in found if {*one[0]} - {256}]


def test_the_label_of_a_text_is_at_its_first_position(tmp_path: Path) -> None:
    lines = {"text": "four", "label": "even"}, {"text": "one", "label": 1}
    found = documents(batch_of(tmp_path / "a.jsonl", *lines, data__end_token=258))
    expected = [
        ([257, *b"four", 258], [0, *[IGNORED] * 5]),
        ([257, *b"one", 258], [1, *[IGNORED] * 4]),
    ]
    assert sorted(found) == sorted(expected)


def test_the_label_of_a_word_is_at_its_first_token(tmp_path: Path) -> None:
    line = {"words": ["two", "and", "3"], "labels": ["even", None, "odd"]}
    words = {"data__form": "words", "model__head": "tokens"}
    ((tokens, labels),) = documents(batch_of(tmp_path / "a.jsonl", line, **words))
    assert tokens == [257, *b"two and 3"]
    assert labels == [IGNORED, 0, *[IGNORED] * 2, *[IGNORED] * 4, 1, IGNORED]


def test_a_pair_is_two_documents_beside_each_other(tmp_path: Path) -> None:
    lines = [{"anchor": f"a{n}", "positive": f"b{n}"} for n in range(2)]
    pairs = {"data__form": "pairs", "model__head": "embedding", "model__labels": []}
    found = documents(batch_of(tmp_path / "a.jsonl", *lines, **pairs))
    assert [bytes(tokens[1:])[:1] for tokens, _ in found] == [b"a", b"b"] * 2
    assert all(bytes(one[0][2:]) == bytes(two[0][2:]) for one, two in zip(found[::2], found[1::2], strict=True))
    assert [labels[0] for _, labels in found] == [0, IGNORED] * 2


def test_long_texts_are_truncated(tmp_path: Path) -> None:
    batch = batch_of(tmp_path / "a.jsonl", {"text": "x" * 100, "label": 0}, data__end_token=258)
    assert batch["document_lengths"][0].tolist() == [S, 0, 0, 0, 0, 0]
    assert batch["tokens"][0, [0, -1]].tolist() == [257, 258]


@pytest.mark.parametrize(
    ("line", "changes", "said"),
    [
        ({"text": "a", "label": "evn"}, {}, "the label 'evn' is none of the classes of the run (even and odd)"),
        ({"text": "a", "label": 2}, {}, "a.jsonl:1: the label 2 is none of the classes of the run"),
        ({"text": "a", "label": True}, {}, "the label True is none of"),
        ({"text": "a"}, {}, "a.jsonl:1 lacks 'text' or 'label' (fields: text)"),
        ({"text": "", "label": 0}, {}, "'text' must be a text that is not empty"),
        (
            {"text": "a", "label": 0},
            {"model__head": "tokens"},
            "is for model.head=sequences, and model.head is 'tokens'",
        ),
        ({"text": "a", "label": 0}, {"data__begin_token": "[CLS]"}, "data.begin_token: '[CLS]' is no special token"),
        ({"text": "a", "label": 0}, {"data__max_documents": 40}, "data.max_documents=40 is more than"),
        (
            {"words": ["a"], "labels": []},
            {"data__form": "words", "model__head": "tokens"},
            "'words' and 'labels' must be lists of equal length",
        ),
    ],
)
def test_what_does_not_fit_is_refused(line: Any, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        batch_of(tmp_path / "a.jsonl", line, **changes)
