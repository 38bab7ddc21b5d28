"""Files: the format byte by byte, pairs that are not whole, and writing that leaves nothing half done."""

import os
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mplug_indexed.files import Reader, Writer, bin_path, dtype_for, idx_path
from mplug_indexed.format import CODES
from mplug_indexed.overlaps import refuse_overlaps

from mplug import RunError, UsageError


def write(prefix: Path, *documents: list[int], dtype: Any = np.uint16) -> Path:
    with Writer(prefix, dtype) as writer:
        writer.add_documents(np.concatenate([*map(np.array, documents), []]), [len(one) for one in documents])
    return prefix


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", [1, 2, 3], [], [4, 5], [65_535])


# The format.


def test_a_document_may_have_several_sequences(tmp_path: Path) -> None:
    with Writer(tmp_path / "c", np.int32) as writer:
        writer.add_document(np.array([1, 2, 3]), [1, 2])
        writer.add_documents(np.array([4, 5]), [1, 1])
        writer.add_document(np.array([]), [])
    reader = Reader(tmp_path / "c")
    assert reader.document_indices.tolist() == [0, 2, 3, 4, 4]
    assert [reader.read(n).tolist() for n in range(len(reader))] == [[1], [2, 3], [4], [5]]


@pytest.mark.parametrize("dtype", CODES.values(), ids=str)
def test_written_documents_are_read_back(tmp_path: Path, dtype: Any) -> None:
    random = np.random.default_rng(1)
    documents = [random.integers(0, 100, random.integers(0, 50)).astype(dtype) for _ in range(40)]
    write(tmp_path / "c", *documents, dtype=dtype)  # type: ignore[arg-type]
    reader = Reader(tmp_path / "c")
    reader.verify()
    assert reader.dtype == dtype
    assert reader.lengths.tolist() == [len(one) for one in documents]
    for number, expected in enumerate(documents):
        np.testing.assert_array_equal(reader.read(number), expected)
        np.testing.assert_array_equal(reader.read(number, 0, len(expected) // 2), expected[: len(expected) // 2])
        np.testing.assert_array_equal(reader.read(number, len(expected) // 2), expected[len(expected) // 2 :])


def test_gathered_pieces_are_concatenated(pair: Path) -> None:
    reader = Reader(pair)
    assert reader.gather([2, 0, 1, 0], [0, 1, 0, 0], [2, 2, 0, 1]).tolist() == [4, 5, 2, 3, 1]
    assert reader.gather([3, 1, 0]).tolist() == [65_535, 1, 2, 3]
    assert reader.gather([]).tolist() == []


@pytest.mark.parametrize("piece", [(4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 4), (0, 4, 0), (0, 1, -1)])
def test_tokens_beyond_a_sequence_cannot_be_read(pair: Path, piece: tuple[int, int, int]) -> None:
    reader = Reader(pair)
    with pytest.raises(IndexError):
        reader.read(*piece)
    with pytest.raises(IndexError):
        reader.gather(*([value] for value in piece))


def test_a_vocabulary_decides_the_type() -> None:
    assert [dtype_for(size).name for size in (2, 65_499, 65_500, 200_000)] == ["uint16", "uint16", "int32", "int32"]


def test_merging_keeps_the_order_of_the_index_if_the_file_has_another(tmp_path: Path, pair: Path) -> None:
    content = bytearray(idx_path(pair).read_bytes())
    struct.pack_into("<4i", content, 34, 1, 0, 2, 3)
    struct.pack_into("<4q", content, 34 + 16, 10, 0, 6, 0)
    idx_path(pair).write_bytes(content)
    with Writer(tmp_path / "merged", np.uint16) as writer:
        writer.append(pair)
    reader = Reader(tmp_path / "merged")
    assert [reader.read(n).tolist() for n in range(4)] == [[65_535], [], [4, 5], [1, 2, 3]]


def test_the_size_of_the_file_decides_whether_it_has_modes(pair: Path) -> None:
    with idx_path(pair).open("ab") as file:
        file.write(bytes([0, 1, 0, 1]))
    modes = Reader(pair).modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0, 1]


def test_a_data_set_without_documents_is_valid(tmp_path: Path) -> None:
    reader = Reader(write(tmp_path / "c"))
    reader.verify()
    assert (len(reader), reader.document_indices.tolist(), len(reader.tokens)) == (0, [0], 0)


# Writing.


def test_the_files_have_their_names_only_when_they_are_complete(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c", np.uint16)
    writer.add_documents(np.array([1]), [1])
    assert not bin_path(tmp_path / "c").exists()
    assert not idx_path(tmp_path / "c").exists()
    writer.close()
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"c.bin", "c.idx"}


def test_an_exception_leaves_the_existing_files(pair: Path) -> None:
    before = Reader(pair).tokens.tolist()
    with pytest.raises(UsageError), Writer(pair, np.uint16) as writer:
        writer.add_documents(np.array([9, 70_000]), [2])
    assert Reader(pair).tokens.tolist() == before
    assert len(list(pair.parent.iterdir())) == 2


def test_an_index_is_never_next_to_the_tokens_of_another(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rename is the last before the machine stops."""
    seen = []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        seen.append((bin_path(pair).stat().st_size, idx_path(pair).exists()))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    write(pair, [7] * 100)
    assert seen == [(12, False), (200, False)]


def test_a_disk_that_fills_keeps_no_part_of_the_written_files(small_disk: Path) -> None:
    """Also where closing the file fails once more."""
    documents = np.ones(1 << 20)
    with pytest.raises(RunError, match="No space left on device"), Writer(small_disk / "c", np.uint16) as writer:
        writer.add_documents(documents, [len(documents)])
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(
    ("tokens", "lengths", "dtype", "sentence"),
    [
        ([65_536], [1], "u2", "token 65536 does not fit into"),
        ([-1], [1], "u2", "token -1 does not fit into"),
        ([2**31], [1], "i4", "token 2147483648 does not fit into"),
        ([256, 1], [2], "u1", "token 256 does not fit into"),
        ([1, 2], [1, 2], "u2", "add up to 3 tokens, and there are 2"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, tokens: list[int], lengths: list[int], dtype: str, sentence: str
) -> None:
    with pytest.raises((UsageError, ValueError), match=sentence), Writer(tmp_path / "c", dtype) as writer:
        writer.add_documents(np.array(tokens), lengths)


def test_types_of_merged_parts_must_agree(tmp_path: Path, pair: Path) -> None:
    refused = pytest.raises(UsageError, match=r"uint16 tokens, and .* has int32 tokens")
    with refused, Writer(tmp_path / "c", np.int32) as writer:
        writer.append(pair)


def test_a_folder_that_cannot_be_written_is_a_usage_error(pair: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write '.*corpus\.bin/c\.bin': .*; use another location"):
        Writer(bin_path(pair) / "c", np.uint16)


# Pairs that are not whole.


def q(number: int) -> bytes:
    return struct.pack("<q", number)


OPENED: list[tuple[int, bytes, str]] = [
    (0, b"PARQUET", "is not an index of this format"),
    (9, q(2), "has version 2 of the format, and mplug reads version 1"),
    (17, b"\x09", "states token type 9.*it is damaged; copy it again"),
    (17, b"\x01", "has 12 bytes, and 'corpus.idx' describes 11: the two files do not belong together"),
    (18, q(5), "states 5 sequences and 5 bounds"),
    (18, q(-1), "states 18446744073709551615 sequences"),
    (26, q(0), "states 4 sequences and 0 bounds"),
    (26, q(2**60), "it is truncated or damaged"),
    (82, q(1), "its documents are sequences 1 to 4 of 4"),
    (82 + 32, q(5), "its documents are sequences 0 to 5 of 4"),
    (46, struct.pack("<i", 2), "has 12 bytes, and 'corpus.idx' needs 14"),
]
VERIFIED: list[tuple[int, bytes, str]] = [
    (34, struct.pack("<i", -1), "sequence 0 has -1 tokens"),
    (34, struct.pack("<i", 2**31 - 1), "sequence 0 has 2147483647 tokens"),
    (66, q(9), "sequence 2 has 2 tokens at byte 9"),
    (66, q(-2), "sequence 2 has 2 tokens at byte -2"),
    (66, q(2**63 - 1), "sequence 2 has 2 tokens"),
    (82 + 8, q(3), "its documents overlap"),
    (58, q(12), ""),  # an empty sequence at the end of the tokens points nowhere
]


@pytest.mark.parametrize(
    ("is_opened", "at", "content", "sentence"),
    [*((False, *row) for row in OPENED), *((True, *row) for row in VERIFIED)],
)
def test_a_damaged_index_is_refused_when_it_is_opened_or_verified(
    pair: Path, is_opened: bool, at: int, content: bytes, sentence: str
) -> None:
    with idx_path(pair).open("r+b") as file:
        file.seek(at)
        file.write(content)
    reader = Reader(pair) if is_opened else None
    with pytest.raises(UsageError, match=sentence) if sentence else nullcontext() as refused:
        reader.verify() if reader else Reader(pair)
    assert "\n" not in str(refused and refused.value)


@pytest.mark.parametrize(
    ("lengths", "pointers", "overlap"),
    [
        ([2, 2, 2], [0, 4, 8], None),
        ([2, 2, 2], [8, 0, 4], None),
        ([2, 0, 2], [0, 2, 4], None),
        ([2, 2, 2], [0, 4, 4], "sequences 1 and 2 overlap"),
        ([2, 2, 2], [0, 2, 8], "sequences 0 and 1 overlap"),
        ([2, 2, 2], [8, 6, 0], "sequences 1 and 0 overlap"),
        ([6, 0, 1], [0, 4, 4], "sequences 0 and 2 overlap"),
    ],
)
def test_sequences_that_overlap_are_refused_by_their_numbers(
    lengths: list[int], pointers: list[int], overlap: str | None
) -> None:
    """Sequences may lie in any order, and an empty one anywhere."""
    arguments = (np.array(lengths, np.int32), np.array(pointers, np.int64), 2, Path("set.idx"))
    if overlap is None:
        refuse_overlaps(*arguments)
        return
    with pytest.raises(UsageError, match=f"'set.idx' is damaged: {overlap}"):
        refuse_overlaps(*arguments)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda pair: os.truncate(bin_path(pair), 10), "needs 12: it is truncated"),
        (lambda pair: os.truncate(bin_path(pair), 11), "not a whole number of uint16"),
        (
            lambda pair: bin_path(pair).write_bytes(bytes(24)),
            r"has 24 bytes, and 'corpus\.idx' describes 12: the two fil",
        ),
        (lambda pair: bin_path(pair).unlink(), r"corpus\.bin' does not exist"),
        (lambda pair: idx_path(pair).unlink(), r"corpus\.idx' does not exist"),
    ],
)
def test_half_a_pair_is_refused(pair: Path, damage: Callable[[Path], None], sentence: str) -> None:
    damage(pair)
    with pytest.raises(UsageError, match=sentence):
        Reader(pair)


def test_the_error_for_a_folder_names_the_data_sets_in_it(pair: Path) -> None:
    with pytest.raises(UsageError, match=rf"is a folder; use a data set in it, such as '{pair}'"):
        Reader(pair.parent)
