"""Datasets: forms, formats of files, blends, streams, and what is refused or counted."""

import gzip
import json
import logging
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from mplug_datasets.samples import PATTERN, pattern

from mplug import Loader, UsageError
from mplug.run.prepare import check_data
from mplug.training.assembly import build_loader
from mplug_testing.harness import tiny_run
from mplug_testing.resume import require_exact_resume

S = 64
IGNORED = -100
TINY: dict[str, Any] = {"data.name": "datasets", "trainer.seq_length": S, "kernels.default": None}
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def arrow(path: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def compressed(path: Path, rows: Rows) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return path


def saved(path: Path, rows: Rows) -> Path:
    """As save_to_disk writes it, with two splits."""
    table = datasets.table.InMemoryTable(pa.Table.from_pylist(rows))
    other = datasets.table.InMemoryTable(pa.Table.from_pylist(rows[:1]))
    splits = {"train": datasets.Dataset(table, fingerprint="a"), "test": datasets.Dataset(other, fingerprint="b")}
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return path


def loader(path: Any, split: str = "train", **changes: Any) -> Loader:
    one = path if not isinstance(path, dict) else next(iter(path))
    own = {"data.path": path if isinstance(path, dict) else str(path), "data.validation_path": str(one)}
    own |= {name.replace("__", "."): value for name, value in changes.items()}
    run = tiny_run({**TINY, **own})
    run.device = "cpu"
    return build_loader(run, split)


def documents(found: Loader, count: int) -> list[str]:
    """The texts of samples of the byte tokenizer, whose token 256 ends a document."""
    tokens = [token for batch in found.take(count) for token in batch["tokens"].flatten().tolist()]
    return bytes(10 if token == 256 else token for token in tokens if token <= 256).decode().split("\n")


def said(row: Any) -> tuple[str, str]:
    """(the text of the first conversation of a sample, its targets) where special tokens are # and $."""

    def text(tokens: list[int]) -> str:
        return "".join({257: "#", 258: "$"}.get(token) or chr(token) for token in tokens if 0 <= token != 256)

    length = int(row["document_lengths"][0, 0])
    return text(row["tokens"][0, :length].tolist()), text(row["labels"][0, :length].tolist())


# What a sample is.

ROWS = [{"text": f"{number} {'abcdefgh'[number % 8] * (number % 9 + 3)}."} for number in range(40)]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_epoch_of_texts_has_every_document_once_with_the_next_token_as_label(
    tmp_path: Path, streaming: bool
) -> None:
    found = loader(jsonl(tmp_path / "a.jsonl", ROWS), data__streaming=streaming)
    total = sum(len(row["text"]) + 1 for row in ROWS)
    batches = list(found.take(-(-(total - 1) // S)))
    targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    assert targets == total - 1  # every token but the epoch's first
    whole = {row["text"] for row in ROWS}
    seen = Counter(
        text for text in documents(loader(tmp_path / "a.jsonl", data__streaming=streaming), 8) if text in whole
    )
    assert set(seen.values()) == {1}
    assert len(seen) > len(ROWS) - 2 * len(batches)  # the others are cut by the borders of samples
    for batch in batches:
        tokens, labels = batch["tokens"], batch["labels"]
        valid = labels[:, :-1] != IGNORED
        assert (labels[:, :-1] == tokens[:, 1:])[valid].all()


@pytest.mark.parametrize("write", [jsonl, compressed, parquet, arrow, saved], ids=lambda write: write.__name__)
def test_every_format_gives_the_samples_of_json_lines(tmp_path: Path, write: Any) -> None:
    suffix = {"jsonl": ".jsonl", "compressed": ".jsonl.gz", "parquet": ".parquet", "arrow": ".arrow"}
    path = write(tmp_path / f"other{suffix.get(write.__name__, '')}", ROWS)
    expected, found = loader(jsonl(tmp_path / "a.jsonl", ROWS)), loader(path)
    assert found.fingerprint == expected.fingerprint
    assert [b["tokens"].tolist() for b in found.take(8)] == [b["tokens"].tolist() for b in expected.take(8)]


def test_a_folder_has_the_splits_of_its_names_and_columns_are_mapped(tmp_path: Path) -> None:
    for name, letter in (("train-00000-of-00002", "a"), ("train-00001-of-00002", "b"), ("test-00000-of-00001", "c")):
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        parquet(tmp_path / "set" / "data" / f"{name}.parquet", [{"content": letter * 8}] * 3)
    own = {"data__columns": {"text": "content"}, "data__validation_path": None, "data__validation_split": "test"}
    seen = {
        split: set("".join(documents(loader(tmp_path / "set", split, **own), 1))) for split in ("train", "validation")
    }
    assert seen == {"train": set("ab"), "validation": {"c"}}
    with pytest.raises(UsageError, match=r"has no split 'dev', only test, train; set data\.split"):
        loader(tmp_path / "set", "validation", **{**own, "data__validation_split": "dev"})


CHAT = "#user\nA?$\n#assistant\nB.$\n"


@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        ("chat", {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}, CHAT),
        ("prompt", {"prompt": "A?", "completion": "B."}, CHAT),
        ("alpaca", {"instruction": "A?", "input": "", "output": "B."}, CHAT),
        ("alpaca", {"instruction": "A", "input": "?", "output": "B."}, CHAT.replace("A?", "A\n\n?")),
        ("prompt", {"prompt": "A?", "completion": "B.", "system": "C"}, f"#system\nC$\n{CHAT}"),
    ],
)
def test_a_form_becomes_a_conversation_whose_answer_is_the_target(
    tmp_path: Path, form: str, row: dict[str, Any], text: str
) -> None:
    for streaming in (False, True):
        found = loader(jsonl(tmp_path / "a.jsonl", [row]), data__form=form, data__streaming=streaming)
        assert said(next(iter(found.take(1)))) == (text, "B.$")


def test_fields_that_other_messages_have_are_not_added_as_null(tmp_path: Path) -> None:
    """A template may test whether a field exists; Parquet stores null for the other messages."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ 'name' in m }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}aFalse{% endif %}"
    )
    messages = [{"role": "user", "content": "A?", "name": "Ann"}, {"role": "assistant", "content": "B.", "name": None}]
    path = parquet(tmp_path / "a.parquet", [{"messages": messages}])
    found = loader(path, data__form="chat", data__template=str(tmp_path / "t.jinja"))
    assert said(next(iter(found.take(1)))) == ("uTrueA?aFalseB.", "B.")


# Blends and the order.


def test_a_blend_has_the_shares_of_its_weights_at_every_length() -> None:
    chosen, before = pattern([6, 3, 1])
    assert Counter(chosen.tolist()) == {0: PATTERN * 6 // 10, 1: PATTERN * 3 // 10, 2: PATTERN // 10}
    shares = [0.6, 0.3, 0.1]
    assert all(
        abs(count - share * number) <= 1
        for number, row in enumerate(before.tolist())
        for count, share in zip(row, shares, strict=True)
    )
    assert Counter(pattern([1e-9, 1.0])[0].tolist()) == {0: 1, 1: PATTERN - 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_blend_reads_each_data_set_in_its_own_order(tmp_path: Path, streaming: bool) -> None:
    paths = {
        str(jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 15}] * 12)): weight
        for name, weight in (("a", 3), ("b", 1))
    }
    found = loader(paths, data__streaming=streaming, data__block=5)
    letters = [set(bytes(t for t in row if t != 256).decode()) for b in found.take(16) for row in b["tokens"].tolist()]
    assert Counter(map(min, letters)) == {"a": 12, "b": 4}
    assert all(len(one) == 1 for one in letters)


@pytest.mark.wide("data")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["text", "prompt"])
def test_a_blend_resumes_exactly_under_another_layout(tmp_path: Path, streaming: bool, form: str) -> None:
    rows = [
        [{"text": f"{name}{n} " * 9, "prompt": f"{n}?", "completion": name * (n % 7 + 1)} for n in range(30)]
        for name in "ab"
    ]
    paths = {str(jsonl(tmp_path / f"{n}.jsonl", own)): n + 1.0 for n, own in enumerate(rows)}
    settings = {**TINY, "data.path": paths, "data.streaming": streaming, "data.form": form, "data.block": 7}
    require_exact_resume(settings, "dp2", [8, 4, 12], "dp4", 40)
    require_exact_resume(settings, "pp2dp2", [8, 60], "cp2", 16)


# What is counted, and what is refused.


def test_damaged_rows_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": None}, *ROWS, {"text": ""}])
    (tmp_path / "b.jsonl").write_text("")
    for streaming in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "mplug.datasets"):
            found = loader(tmp_path / "*.jsonl", data__streaming=streaming, data__block=9)
            list(found.take(12))
        assert f"2 damaged rows were skipped of 42; the first: row 1 of '{path}' has no 'text'" in caplog.text
        with pytest.raises(UsageError, match=r"row 1 of '.*a\.jsonl' has no 'text'; correct it, or set data\.damaged"):
            list(loader(path, data__damaged="refuse", data__streaming=streaming).take(1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.path": "some/dataset"}, r"'some/dataset' does not exist on this machine.*mplug downloads nothing"),
        ({"data.path": "https://host/a.jsonl"}, r"there is nothing at 'https://host/a.jsonl'"),
        ({"data.path": "folder"}, r"'folder' contains no file \.jsonl, \.json, \.parquet or \.arrow"),
        ({"data.path": "notes.txt"}, r"'.*notes\.txt' is no file \.jsonl"),
        ({"data.path": "empty.jsonl"}, r"'empty\.jsonl' has no rows"),
        ({"data.path": "bad.jsonl"}, r"cannot read '.*bad\.jsonl': JSON parse error"),
        ({"data.path": "bad.parquet"}, r"cannot read '.*bad\.parquet': Parquet file size is 4 bytes"),
        ({"data.form": "chat"}, r"'good\.jsonl' has no column 'messages'.*\(columns: text\); set data\.form=text"),
        ({"data.columns": {"text": "body"}}, r"has no column 'body'.*name the column in data\.columns"),
        ({"data.columns": {"txt": "body"}}, r"'txt' is no column of form text; use text"),
        ({"data.split": "dev"}, r"'good\.jsonl' has no split 'dev', only train"),
        ({"data.path": {"good.jsonl": 0}}, r"'good\.jsonl' has the weight 0; use a number above 0"),
        ({"data.path": ["good.jsonl", "good.jsonl"]}, r"must have each name once"),
        ({"data.validation_split": "a", "data.validation_path": "b"}, r"both set; remove one"),
        ({"data.form": "chat", "data.max_documents": S + 1}, rf"data\.max_documents={S + 1} is more than"),
    ],
)
def test_what_cannot_work_is_refused_before_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it contacts a network"))
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "good.jsonl", ROWS)
    for name, content in (
        ("notes.txt", "x"),
        ("empty.jsonl", ""),
        ("bad.jsonl", '{"text": \n'),
        ("bad.parquet", "PAR1"),
    ):
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=sentence):
        check_data(tiny_run({**TINY, "data.path": "good.jsonl", "trainer.eval_every": 1, **changes}))


def test_a_split_without_usable_rows_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "A?", "completion": None}])
    for streaming in (False, True):
        with pytest.raises(
            UsageError, match=r"no row of the .*split can be used: of 1, 1 are damaged.*has no 'completion'"
        ):
            list(loader(path, data__form="prompt", data__streaming=streaming).take(1))


def test_encoded_rows_are_used_again_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "cache" / "mplug" / "datasets"
    loader(path)
    (first,) = cache.glob("*.arrow")
    written = first.stat().st_mtime_ns
    loader(path, trainer__seed=7)
    assert [(one, one.stat().st_mtime_ns) for one in cache.glob("*.arrow")] == [(first, written)]
    jsonl(path, ROWS[:-1])
    loader(path)
    assert len([*cache.glob("*.arrow")]) == 2
