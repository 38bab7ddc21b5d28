"""Preprocessing: every format gives the same documents, no worker or kill changes a bit, bad input is named."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import mplug_indexed.format as format_of_files
import numpy as np
import pytest

pytest.importorskip("psutil")
pytest.importorskip("zstandard")

import zstandard
from mplug_indexed.preprocess.documents import Texts
from mplug_indexed.preprocess.job import preprocess
from mplug_indexed.preprocess.sources import cut, find_sources
from preprocessed import BYTES, DOCUMENTS, data_of, expected, job, leftovers, lines_of, written

from mplug import UsageError

# What is written.


@pytest.mark.parametrize(
    ("chunk_size", "workers", "eod"), [(700, 2, True), (211, 1, False), (1 << 20, 1, True), (900, 3, True)]
)
def test_the_files_are_those_of_the_format_whatever_the_chunks_and_workers(
    tmp_path: Path, texts: Path, chunk_size: int, workers: int, eod: bool
) -> None:
    outcome = preprocess(job(tmp_path / "out", texts, append_eod=eod, chunk_size=chunk_size, workers=workers))
    assert data_of(tmp_path / "out") == expected(DOCUMENTS, eod)
    assert outcome.documents == len(DOCUMENTS)
    assert outcome.tokens == sum(len(text.encode()) + eod for text in DOCUMENTS)
    assert leftovers(tmp_path) == []
    told = json.loads((tmp_path / "out.preprocess.json").read_text())
    assert (told["documents"], told["num_bad"], told["dtype"]) == (len(DOCUMENTS), 0, "uint16")
    assert [source["path"] for source in told["inputs"]] == [str(texts)]
    assert told["files"]["out.bin"]["bytes"] == len(expected(DOCUMENTS, eod)[0])


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n"])
def test_however_a_file_is_cut_each_line_is_read_once_with_its_number(tmp_path: Path, end: bytes) -> None:
    path = written(tmp_path / "t.jsonl", b'{"text": "a"}\n\n{"text": "bb"}\r\n{"no": 1}\n{"text": "c"}' + end)
    sources = find_sources([str(path)], None, None)
    for size in range(1, path.stat().st_size + 2):
        found, bad, before = [], [], 0
        for chunk in cut(sources, size):
            reader = Texts(chunk, "text")
            found += list(reader)
            bad += [before + one.line for one in reader.bad]
            before += reader.lines
        assert (found, bad) == (["a", "bb", "c"], [4]), size


def parquet(path: Path, texts: list[Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=17)
    return path


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    half = len(DOCUMENTS) // 2
    packed = zstandard.ZstdCompressor().compress
    inputs = {
        "plain": written(tmp_path / "a" / "texts.jsonl", lines_of(DOCUMENTS)),
        "byte order mark": written(tmp_path / "b" / "texts.json", b"\xef\xbb\xbf" + lines_of(DOCUMENTS)),
        "gz": written(tmp_path / "c" / "texts.jsonl.gz", gzip.compress(lines_of(DOCUMENTS))),
        "zst of two frames": written(
            tmp_path / "d" / "t.ndjson.zst", packed(lines_of(DOCUMENTS[:half])) + packed(lines_of(DOCUMENTS[half:]))
        ),
        "parquet": parquet(tmp_path / "texts.parquet", DOCUMENTS),
    }
    for name, path in inputs.items():
        preprocess(job(tmp_path / name, path, workers=1))
        assert data_of(tmp_path / name) == expected(DOCUMENTS), name


def test_documents_have_the_order_of_the_named_inputs_and_of_the_files_below_them(tmp_path: Path) -> None:
    for number, text in enumerate(DOCUMENTS[:30]):
        written(tmp_path / "texts" / f"{number % 3}" / f"{number:03}.txt", text.encode())
    in_order = [DOCUMENTS[number] for number in sorted(range(30), key=lambda number: (number % 3, number))]
    preprocess(job(tmp_path / "out", tmp_path / "texts"))
    assert data_of(tmp_path / "out") == expected(in_order)
    last = written(tmp_path / "a.jsonl", lines_of(["last"]))
    preprocess(job(tmp_path / "some", tmp_path / "texts", last, pattern="0/*.txt"))
    assert data_of(tmp_path / "some") == expected([*DOCUMENTS[:30:3], "last"])


def test_large_vocabularies_are_stored_as_i32(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_of_files, "SMALL_VOCABULARY", 257)
    preprocess(job(tmp_path / "out", texts))
    tokens = np.fromfile(tmp_path / "out.bin", "<i4")
    assert tokens.tolist() == np.frombuffer(expected(DOCUMENTS)[0], "<u2").tolist()


def test_empty_documents_are_skipped_and_counted_and_other_fields_may_hold_anything(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", lines_of(["", "one", ""]) + b'{"score": NaN, "text": "kept"}\n')
    assert preprocess(job(tmp_path / "out", path)).empty == 2
    assert data_of(tmp_path / "out") == expected(["one", "kept"])


# Bad documents.

BAD = {
    b'{"text": "unfinished': "is not valid JSON: ",
    b'{"text": "\xff"}': "is not valid UTF-8 at byte 11",
    b'{"body": "b", "id": 1}': "has no field 'text' (it has body, id)",
    b'"text"': "is a string; it must be an object with a field 'text'",
    b'{"text": ' + b"[" * 100_000: "cannot be parsed as JSON: ",
    b'{"text": null}': "has null in field 'text', which must be a string",
    b'{"text": "\\ud83c"}': "has an unpaired surrogate in field 'text'",
}


@pytest.mark.parametrize("line", BAD, ids=BAD.values())
def test_a_bad_line_is_an_error_or_is_skipped_and_reported_with_file_and_number(tmp_path: Path, line: bytes) -> None:
    lines = lines_of(DOCUMENTS[:50]).splitlines(keepends=True)
    path = written(tmp_path / "t.jsonl", b"".join([*lines[:20], line + b"\n", *lines[20:]]))
    with pytest.raises(UsageError) as refused:
        preprocess(job(tmp_path / "out", path))
    assert str(refused.value).startswith(f"{path}:21 {BAD[line]}")
    assert not (tmp_path / "out.bin").exists()
    outcome = preprocess(job(tmp_path / "out", path, bad_lines="skip"))
    assert (outcome.num_bad, len(outcome.bad)) == (1, 1)
    assert outcome.bad[0].startswith(f"{path}:21 {BAD[line]}")
    assert data_of(tmp_path / "out") == expected(DOCUMENTS[:50])


def test_the_error_names_the_first_bad_line_whichever_worker_fails_first(tmp_path: Path) -> None:
    lines = [b"broken\n" if number in (40, 90) else b'{"text": "some text"}\n' for number in range(1, 101)]
    path = written(tmp_path / "t.jsonl", b"".join(lines))
    with pytest.raises(UsageError, match=r"t\.jsonl:40 is not valid JSON"):
        preprocess(job(tmp_path / "out", path, workers=2, chunk_size=300))
    outcome = preprocess(job(tmp_path / "out", path, bad_lines="skip", chunk_size=300))
    assert [sentence.split(" ")[0] for sentence in outcome.bad] == [f"{path}:40", f"{path}:90"]


def test_the_errors_name_bad_rows_and_bad_files(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", ["one", None, "two"])
    broken = written(tmp_path / "broken.txt", b"half \xe4")
    outcome = preprocess(job(tmp_path / "out", table, broken, bad_lines="skip"))
    assert outcome.bad == [
        f"{table}:2 has null in column 'text', which must be a string",
        f"{broken} is not valid UTF-8 at byte 6",
    ]
    assert data_of(tmp_path / "out") == expected(["one", "two"])


# Bad input.

PACKED = zstandard.ZstdCompressor().compress(lines_of(DOCUMENTS))
DAMAGED, INCOMPLETE = "' is damaged or truncated", "' is damaged or truncated: its last frame is incomplete"
EMPTY = "' is damaged or truncated: a compressed file is not empty"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("t.jsonl", b'{"text": ""}\n\n', "the inputs have no valid document: 1 are empty, 0 are invalid"),
        ("t.jsonl", b"no\nno\n", r"2 are invalid \(the first: .*t\.jsonl:1 is not valid JSON"),
        ("t.jsonl.gz", gzip.compress(lines_of(DOCUMENTS))[:-30], DAMAGED),
        ("t.jsonl.gz", b"no gzip at all", DAMAGED),
        ("t.jsonl.gz", b"", EMPTY),
        ("t.jsonl.zst", b"no zstandard", DAMAGED),
        ("t.jsonl.zst", b"", EMPTY),
        ("t.jsonl.zst", PACKED[:3], INCOMPLETE),
        ("t.jsonl.zst", PACKED[:-30], INCOMPLETE),
        ("t.txt.zst", PACKED[:-30], INCOMPLETE),
        ("t.jsonl.zst", PACKED * 2 + PACKED[:-1], INCOMPLETE),
        ("t.parquet", b"no table", "' is not a valid Parquet file"),
        ("t.csv", b"a,b", "' has none of the suffixes .*; set --format"),
    ],
)
def test_inputs_without_documents_and_damaged_ones_are_refused(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    good, path = written(tmp_path / "good.jsonl", lines_of(DOCUMENTS)), written(tmp_path / name, data)
    for inputs in ((path,), (good, path)) if said.startswith("' is damaged") else ((path,),):
        with pytest.raises(UsageError, match=(re.escape(name) if said.startswith("'") else "") + said):
            preprocess(job(tmp_path / "out", *inputs, bad_lines="skip"))
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.idx").exists()


@pytest.mark.parametrize(
    ("names", "pattern", "said"),
    [
        (("nowhere.jsonl",), None, r"cannot read '.*nowhere\.jsonl': No such file"),
        (("texts.jsonl", "."), None, "is given twice"),
        ((".",), "*.c", r"contains no file that matches '\*\.c'"),
        ((".",), "/*", r"--pattern '/\*' is not a valid glob"),
    ],
)
def test_missing_and_repeated_inputs_are_refused(
    tmp_path: Path, texts: Path, names: tuple[str, ...], pattern: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        find_sources([str(tmp_path / name) for name in names], None, pattern)


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", ["one"])
    with pytest.raises(UsageError, match=r"has no column 'body' \(it has id, text\); set --key"):
        preprocess(job(tmp_path / "out", table, key="body"))


def test_the_error_names_the_damaged_part_of_a_table(tmp_path: Path) -> None:
    """Text that is none is a bad row; a page that does not unpack damages the file."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    ends = arrow.py_buffer(np.array([0, 2, 3], "i4").tobytes())
    no_text = arrow.Array.from_buffers(arrow.utf8(), 2, [None, ends, arrow.py_buffer(b"ok\xff")])
    write_table(arrow.table({"text": no_text}), tmp_path / "a.parquet")
    outcome = preprocess(job(tmp_path / "a", tmp_path / "a.parquet", bad_lines="skip"))
    assert outcome.bad == [f"{tmp_path / 'a.parquet'}:2 is not valid UTF-8 at byte 1 of column 'text'"]
    assert data_of(tmp_path / "a") == expected(["ok"])
    content = bytearray(parquet(tmp_path / "b.parquet", DOCUMENTS).read_bytes())
    content[20:400] = b"\xaa" * 380
    (tmp_path / "b.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=r"b\.parquet' is damaged or truncated: .*; download it again"):
        preprocess(job(tmp_path / "b", tmp_path / "b.parquet"))


def test_an_end_that_the_tokenizer_lacks_is_refused(tmp_path: Path, texts: Path) -> None:
    without = type(BYTES)(**{**BYTES.__dict__, "eod": None})
    with pytest.raises(UsageError, match="--append-eod: tokenizer 'bytes' has no token that ends a document"):
        preprocess(job(tmp_path / "out", texts, tokenizer=without))


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_bytes.ByteTokenizer.encode_batch", lambda _, texts: [[300] for _ in texts])
    with pytest.raises(UsageError, match="tokenizer 'bytes' returns token 300, and its vocabulary has 257 tokens"):
        preprocess(job(tmp_path / "out", texts))
    assert not (tmp_path / "out.bin").exists()
