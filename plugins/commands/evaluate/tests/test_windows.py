"""Windows predict every token of documents once, with the context that the stride leaves them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_evaluate.documents import Start, read_documents
from mplug_evaluate.windows import Windows

from mplug import IGNORED, UsageError

BYTES = Start(lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"), 0)


@settings(max_examples=200)
@given(st.data())
def test_every_token_but_the_first_of_a_document_is_predicted_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda sizes: max(sizes) > 1))
    length = data.draw(st.integers(1, 9))
    stride = data.draw(st.integers(1, length))
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    windows = Windows(documents, length, stride)
    batch = windows.read(range(windows.count))
    assert batch["tokens"].shape == batch["labels"].shape == (windows.count, length)
    found = list[int]()
    for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        for place, label in enumerate(labels):
            if label == IGNORED:
                continue
            found.append(label)
            before = label % 100  # tokens of the document before this one
            seen = min(before, length) if stride == length else min(before, length - stride + 1)
            context = tokens[: place + 1]
            assert context == list(range(label - len(context), label)), "its own document, without padding"
            assert len(context) >= (seen if stride < length else 1)
    assert found == [token for one in documents for token in one[1:]]
    assert windows.read(range(windows.count, windows.count + 1))["tokens"].tolist() == batch["tokens"][:1].tolist()


def test_a_file_is_one_document_or_one_per_json_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aé\nb")
    (tmp_path / "b.jsonl").write_text('{"text": "ab\\nc", "id": 1}\n{"text": ""}\n{"text": "xé"}\n')
    whole, lines = (read_documents(tmp_path / name, BYTES) for name in ("a.txt", "b.jsonl"))
    assert (whole.tokens, whole.num_targets, whole.num_bytes) == ((list("aé\nb".encode()),), 4, 4)
    assert (lines.num_targets, lines.num_bytes) == (5, 5)
    assert lines.tokens[1] == []
    with_start = Start(lambda text: [0, *text.encode()], BYTES.decode, 1)
    assert read_documents(tmp_path / "b.jsonl", with_start).num_bytes == 7
    (tmp_path / "c.txt").write_text("éa")
    assert read_documents(tmp_path / "c.txt", BYTES).num_bytes is None, "the first token is half of a character"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"a", "nothing to predict"),
        ("a.txt", b"ab\xff", r"no text in UTF-8 \(byte 2\)"),
        ("a.jsonl", b'{"text": "ab"}\n{"txt": "cd"}', "line 2 has no text in the field 'text'"),
        ("a.jsonl", b'{"messages": []}', "line 1 is a conversation, and no document"),
        ("a.jsonl", b'{"text": "ab"}\n\n', "line 2 is no JSON"),
        ("a.jsonl", b'{"text": "\\ud800b"}', "half a character"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_documents(tmp_path / name, BYTES)
