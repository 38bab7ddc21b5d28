"""Jotter: mplug's suite for data plugins, and what is jotter's own: lines, packing and the two orders."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mplug_testing import DataSuite
from nova_jotter import END, Jotter, Tokens
from nova_jotter.buffer import BufferedLoader
from nova_jotter.corpus import documents, pack
from nova_jotter.windows import Permutations, Windows

from mplug import UsageError

NOTES = Path(__file__).with_name("notes.jsonl")
S = 4


class TestJotter(DataSuite):
    plugin = "jotter"
    settings = {"data.path": str(NOTES)}
    examples = {"field": ["title"]}  # which the file does not have


class TestJotterWithABuffer(TestJotter):
    settings = {"data.path": str(NOTES), "data.shuffle_buffer": 30}


# Lines.


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "lines.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "unfinished', "lines.jsonl:3 is not JSON"),
        (b'{"text": "\xff"}', "lines.jsonl:3 is not JSON"),
        ('["text"]', "lines.jsonl:3 holds a JSON list; a line is an object with a field 'text'"),
        ('{"body": "b", "id": 1}', "lines.jsonl:3 has no field 'text', only body, id; set data.field"),
        ('{"text": 7}', "lines.jsonl:3 has a int in its field 'text'; it must be text"),
    ],
)
def test_a_bad_line_is_refused_by_its_file_and_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = written(tmp_path, '{"text": "good"}', "", line, '{"text": "good too"}')
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        pack(path, "text", 10)
    assert len(str(refused.value).splitlines()) == 1


def test_empty_documents_and_blank_lines_leave_no_trace(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "a"}', " ", '{"text": ""}', '{"text": "b"}', "")
    assert list(documents(path, "text")) == ["a", "b"]


def test_a_file_that_is_missing_is_refused_before_the_run() -> None:
    with pytest.raises(UsageError, match=r"data\.path 'nowhere\.jsonl' is not a file"):
        Jotter(Jotter.Config(path="nowhere.jsonl")).configure()


def test_a_split_that_is_too_short_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"has 4 tokens; a sample of trainer\.seq_length=4 needs one more"):
        Windows(np.arange(4, dtype=np.uint8), 4)


# Packing.


def test_documents_are_packed_end_to_end_each_with_its_end(tmp_path: Path) -> None:
    path = written(tmp_path, *(json.dumps({"body": text}) for text in ("one", "zwölf", "3")))
    corpus = pack(path, "body", 1)
    assert corpus.train.tolist() == [*b"one", END, *"zwölf".encode(), END, *b"3", END]
    assert corpus.validation.tolist() == []


def test_every_document_is_on_one_side_and_its_copies_with_it(tmp_path: Path) -> None:
    texts = [f"document {n % 100}" for n in range(200)]
    corpus = pack(written(tmp_path, *(json.dumps({"text": text}) for text in texts)), "text", 30)
    sides = [
        Tokens().decode(np.where(side == END, 10, side).tolist()).splitlines()
        for side in (corpus.train, corpus.validation)
    ]
    assert sorted(sides[0] + sides[1]) == sorted(texts)
    assert not set(sides[0]) & set(sides[1])
    assert 15 <= len(set(sides[1])) <= 45  # 30 of 100, within three standard deviations


def test_a_window_has_the_tokens_from_its_place_on_and_the_label_after_them() -> None:
    windows = Windows(np.arange(14, dtype=np.uint8), S)
    batch = windows.read(range(7, 9), [2, 0])
    assert windows.count == 3
    assert batch["tokens"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert batch["sample_ids"].tolist() == [7, 8]


# Orders.


def test_a_permutation_takes_every_window_once_an_epoch_each_in_its_own_order() -> None:
    order = Permutations(50, seed=3)
    epochs = [[order.window(sample) for sample in range(50 * epoch, 50 * epoch + 50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def drawn(loader: BufferedLoader, number: int) -> list[int]:
    """The windows of the next samples, told by their first tokens."""
    return [int(row[0]) // S for batch in loader.take(number) for row in batch["tokens"]]


def buffered(capacity: int) -> BufferedLoader:
    windows = Windows(np.arange(50 * S + 1, dtype=np.uint8), S)
    return BufferedLoader(windows, capacity, seed=3, shard=(0, 1), micro_batch_size=5)


def test_a_buffer_takes_every_window_once_an_epoch_and_never_looks_farther_than_it_holds() -> None:
    loader = buffered(8)
    for _ in range(2):
        epoch = drawn(loader, 50)
        assert sorted(epoch) == list(range(50))
        assert all(window < place + 8 for place, window in enumerate(epoch))
        assert epoch != sorted(epoch)


def test_the_state_of_a_buffer_is_the_walk_and_what_waits() -> None:
    loader = buffered(8)
    seen = drawn(loader, 13)
    state = loader.state_dict()
    assert (state["samples"], state["next"]) == (13, 20)
    assert sorted([*seen, *state["buffer"].tolist()]) == list(range(20))
    assert state["buffer"].dtype is torch.int64


def test_a_run_that_had_no_buffer_is_not_resumed_with_one() -> None:
    with pytest.raises(UsageError, match=r"resume it with data\.shuffle_buffer=null"):
        buffered(8).load_state_dict({"samples": 3})
