"""Packed: a loader of conversations, from the file to the micro batch, and the runs that it feeds."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mplug import Loader, MicroBatch, UsageError
from mplug.run.prepare import check_data
from mplug.training.assembly import build_loader
from mplug_testing import DataSuite
from mplug_testing.harness import tiny_run

CHATS = Path(__file__).with_name("chats.jsonl")
S = 128
TINY: dict[str, Any] = {
    "data.name": "packed",
    "data.validation_percent": 20,
    "data.max_documents": 5,
    "trainer.seq_length": S,
    "kernels.default": None,
}
IGNORED = -100


class TestPacked(DataSuite):
    plugin = "packed"
    settings = {**TINY, "data.path": str(CHATS)}
    examples = {
        "validation_path": [str(CHATS)],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "template": ["llama3"],
        "template_variables": [{"bos_token": "<s>"}],
        "special_tokens": [["<|im_start|>"]],
    }
    beside = {"template_variables": {"data.template": str(CHATS.with_name("variable.jinja"))}}


def written(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in conversations]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def asked(question: str, answer: str) -> list[tuple[str, str]]:
    return [("user", question), ("assistant", answer)]


def loader(path: Path, split: str = "train", **changes: Any) -> Loader:
    own = {"data.path": str(path), "data.validation_path": str(path), **changes}
    run = tiny_run({**TINY, **{name.replace("__", "."): value for name, value in own.items()}})
    run.device = "cpu"
    return build_loader(run, split)


def tokens(text: str) -> list[int]:
    """By hand: bytes, the end of a document, and the two tokens of chatml after them."""
    special = {"\x01": 257, "\x02": 258}
    marked = text.replace("<|im_start|>", "\x01").replace("<|im_end|>", "\x02")
    return [token for letter in marked for token in ([special[letter]] if letter in special else letter.encode())]


def rows(batch: MicroBatch, row: int = 0) -> dict[str, list[int]]:
    return {name: entry[row].tolist() for name, entry in batch.items()}


# What a sample is.


def test_a_sample_has_concatenated_conversations_and_padding(tmp_path: Path) -> None:
    path = written(tmp_path / "two.jsonl", asked("Hi", "Ho"), [*asked("What?", "That."), *asked("Really?", "Yes.")])
    found = loader(path, trainer__seq_length=160)
    longer = (
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>\n"
        "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    shorter = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    parts = [tokens(longer), tokens(shorter)]
    rest = 160 - sum(map(len, parts))
    row = rows(next(iter(found.take(1))))
    assert row["document_lengths"] == [*map(len, parts), rest, 0, 0]
    assert row["tokens"] == [*parts[0], *parts[1], *[256] * rest]
    assert row["positions"] == [place for length in (*map(len, parts), rest) for place in range(length)]


def test_targets_are_the_answers_and_their_end_tokens(tmp_path: Path) -> None:
    path = written(tmp_path / "one.jsonl", [("system", "So."), *asked("A?", "Bé"), *asked("C?", "D")])
    row = rows(next(iter(loader(path).take(1))))
    targets = [label for label in row["labels"] if label != IGNORED]
    assert targets == [*tokens("Bé<|im_end|>"), *tokens("D<|im_end|>")]
    for place, label in enumerate(row["labels"][:-1]):
        assert label in (IGNORED, row["tokens"][place + 1])
    first = row["labels"].index(tokens("B")[0])
    assert row["tokens"][:first + 1] == tokens(
        "<|im_start|>system\nSo.<|im_end|>\n<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip


def test_every_conversation_is_in_one_sample_of_an_epoch_and_no_target_is_in_the_next() -> None:
    found = loader(CHATS)
    seen = []
    for batch in found.take(found.samples_per_epoch):  # type: ignore[attr-defined]
        for row, labels, lengths in zip(batch["tokens"], batch["labels"], batch["document_lengths"], strict=True):
            ends = lengths.cumsum(0) - 1
            assert labels[ends[ends < S - 1]].eq(IGNORED).all()  # one that is truncated keeps its last target
            seen += [tuple(one.tolist()) for one in row.split(lengths[lengths > 0].tolist())]
    expected = []
    for line in CHATS.read_text().splitlines():
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in json.loads(line)["messages"])
        expected.append(tuple(tokens("".join(turns)))[:S])
    assert sorted(document for document in seen if document[0] != 256) == sorted(expected)


def test_a_truncated_conversation_keeps_the_target_after_its_last_token(tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", asked("A?", "0123456789" * 30))
    row = rows(next(iter(loader(path).take(1))))
    whole = tokens("<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n" + "0123456789" * 30)
    assert row["tokens"] == whole[:S]
    assert row["labels"][-1] == whole[S]
    assert row["document_lengths"] == [S, 0, 0, 0, 0]


def test_a_tokenizer_that_merges_keeps_its_special_tokens_and_the_answers(tmp_path: Path) -> None:
    from byte_level import byte_level

    library = byte_level([CHATS.read_text()], "<|im_end|>", "<|im_start|>", size=330)
    library.save(str(tmp_path / "tokenizer.json"))
    own = {"data.tokenizer": "huggingface", "data.tokenizer_options": {"path": str(tmp_path / "tokenizer.json")}}
    found = loader(CHATS, **own, **{"model.vocab_size": 330})
    assert found.vocab_size == library.get_vocab_size() == 330
    answers = [m["content"] for line in CHATS.read_text().splitlines() for m in json.loads(line)["messages"]]
    for batch in found.take(40):
        for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
            said = library.decode([label for label in labels if label != IGNORED], skip_special_tokens=False)
            whole = library.decode(tokens, skip_special_tokens=False)
            assert all(answer in answers for answer in said.split("<|im_end|>")[:-1])
            assert said.count("<|im_end|>") == whole.count("<|im_start|>assistant")
            assert labels.count(0) == said.count("<|im_end|>")


# What is left out, and counted.


def told(caplog: pytest.LogCaptureFixture, path: Path, **changes: Any) -> str:
    with caplog.at_level(logging.INFO, "mplug.packed"):
        loader(path, **changes)
    return caplog.messages[-1]


def test_skipped_conversations_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(
        tmp_path / "mixed.jsonl",
        asked("Fine?", "Fine."),
        asked("Long?", "no " * 200),
        asked("x" * 200, "The answer begins after the end."),
        [("user", "Nobody answers.")],
        asked("How does a turn end?", "By <|im_end|>."),
    )
    assert "2 of 5 conversations in 2 samples" in told(caplog, path)
    assert "(1 truncated; dropped: 0 too long, 2 without an answer, 1 with a special token" in caplog.messages[-1]
    assert "1 of 5 conversations in 1 samples" in told(caplog, path, data__too_long="drop")
    assert "(0 truncated; dropped: 1 too long, 2 without an answer, 1 with a special token" in caplog.messages[-1]


def test_a_conversation_of_one_token_more_than_the_sequence_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = len(tokens("<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"))
    for extra, said in ((1, "(0 truncated"), (2, "(1 truncated")):
        path = written(tmp_path / "edge.jsonl", asked("A?", "b" * (S + extra - header)))
        assert said in told(caplog, path)


def test_an_empty_split_is_refused_with_the_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "mute.jsonl", [("user", "Hello?")], asked("x" * 200, "Late."))
    with pytest.raises(
        UsageError, match=r"mute\.jsonl.*no conversation of the train split can be used: of 2, .* 2 have no answer"
    ):
        loader(path)


# Splits.


def test_the_messages_of_a_conversation_decide_its_split(tmp_path: Path) -> None:
    def shown(path: Path, split: str) -> set[tuple[int, ...]]:
        found = loader(path, split, data__validation_path=None, data__max_documents=2)
        batches = found.take(found.samples_per_epoch)  # type: ignore[attr-defined]
        return {
            tuple(row[: lengths[0]])
            for batch in batches
            for row, lengths in zip(batch["tokens"].tolist(), batch["document_lengths"].tolist(), strict=True)
        }

    conversations = [asked(f"What is {n}?", f"It is {n}.") for n in range(60)]
    path = written(tmp_path / "all.jsonl", *conversations)
    train, held_out = shown(path, "train"), shown(path, "validation")
    assert len(train) + len(held_out) == 60
    assert not train & held_out
    assert 2 <= len(held_out) <= 25  # 20% of 60, within four standard deviations
    backwards = written(tmp_path / "some.jsonl", *reversed(conversations[20:]))
    assert shown(backwards, "validation") == held_out & (shown(backwards, "train") | shown(backwards, "validation"))


def test_several_files_and_compressed_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = written(tmp_path / "b.jsonl", asked("A?", "B."))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes() * 2))
    (tmp_path / "notes.txt").write_text("not one of them")
    assert "3 of 3 conversations" in told(caplog, tmp_path)
    assert "1 of 1 conversations" in told(caplog, tmp_path / "*.jsonl")


# Bad input: a sentence each.

GOOD = '{"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"chats\.jsonl:3 is not valid JSON"),
        ('{"conversations": []}', r"chats\.jsonl:3 has no list 'messages' \(fields: conversations\)"),
        ('{"messages": [{"from": "human", "value": "A?"}]}', r"chats\.jsonl:3, message 1, has no string 'role'"),
        ('{"messages": [{"role": "user", "content": [1]}]}', r"message 1, has a 'content' of type list"),
        (b"\xff\xfe", r"chats\.jsonl:3 is not valid UTF-8 at byte 1; correct the line, or remove it"),
        ("[" * 100_000, r"chats\.jsonl:3 cannot be parsed as JSON: .*recursion"),
        (GOOD.replace("B.", "\\ud800"), r"chats\.jsonl:3 has an unpaired surrogate in a text; correct the line"),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{}]}]}',
            r"jsonl:3: data\.template 'chatml' fails for this conversation: it does not support a message without cont",
        ),
    ],
)
def test_the_error_names_a_line_that_is_no_conversation(tmp_path: Path, line: str | bytes, said: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(f"{GOOD}\n\n".encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UsageError, match=said):
        loader(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.path": "nowhere.jsonl"}, r"data\.path 'nowhere\.jsonl' does not exist"),
        ({"data.path": "folder"}, r"data\.path 'folder' contains no file"),
        ({"data.path": ""}, r"data\.path .*at least 1 character"),
        ({"data.validation_path": "nowhere"}, r"data\.validation_path 'nowhere' does not exist"),
        ({"data.tokenizer": "bites"}, "'bites'.*did you mean 'bytes'"),
        ({"data.tokenizer_options": {"path": "x"}}, r"tokenizers/bytes: path \(data\.tokenizer\): unknown field"),
        ({"data.template": "chatlm"}, r"data\.template 'chatlm' is neither a built-in template \(chatml, llama3\)"),
        ({"data.path": "empty.jsonl"}, r"empty\.jsonl' has no conversation; set data\.path to files"),
        ({"data.path": "bad.jsonl"}, r"bad\.jsonl:1 has no list 'messages' \(list\)"),
        ({"data.max_documents": S + 1}, rf"data\.max_documents={S + 1} is more than trainer\.seq_length={S}"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in (("empty", "\n"), ("bad", "[1]\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.raises(UsageError, match=said):
        check_data(tiny_run({**TINY, "data.path": str(CHATS), "trainer.eval_every": 1, **changes}))


def test_a_run_is_prepared_without_its_data_and_knows_its_entries() -> None:
    """So that its checkpoints can be sampled."""
    run = tiny_run({**TINY, "data.path": "moved.jsonl"})
    assert run.hooks.call.build_tokenizer(run=None) is not None
    assert run.entries == {"document_lengths"}
