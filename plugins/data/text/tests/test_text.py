"""Text: which files make a corpus, how it is split, and the order of its windows."""

import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mplug_text import Bytes, Text
from mplug_text.corpus import find_files, measure_split, read_split
from mplug_text.tokens import tokens_of
from mplug_text.windows import RepeatedWindows, Windows

from mplug import MapLoader, Mesh, UsageError
from mplug_testing import DataSuite

S = 8


class TestText(DataSuite):
    plugin = "text"
    settings = {"data.path": str(Path(__file__).with_name("pi.txt"))}
    examples = {"pattern": ["a*"], "tokenizer": ["no-such-tokenizer"], "tokenizer_options": [{"no_such_option": 1}]}
    beside = {
        "pattern": {"data.path": str(Path(__file__).with_name("short"))},
        "tokenizer_options": {"data.tokenizer": "bytes"},
    }
    other_data = {"data.path": str(Path(__file__).with_name("short"))}


def loader(path: Path, split: str = "train", **options: Any) -> MapLoader:
    config = SimpleNamespace(trainer=SimpleNamespace(seq_length=S, seed=1))
    run: Any = SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=2)
    return Text(Text.Config(path=str(path), **options)).build_loader(run, split)  # type: ignore[arg-type]


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def numbered(folder: Path, number: int) -> Path:
    """A folder of files, each of which says which one it is."""
    return write(folder, {f"part{n % 3}/{n:03}.txt": f"<{n}>" * 5 for n in range(number)})


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, size=1000).astype(np.uint8)))
    return path


# Finding files.


@pytest.mark.parametrize(
    ("path", "pattern", "root", "expected"),
    [
        ("", "**/*", "", ["a.txt", "x/a.txt", "x/b.txt", "x/d.py", "x/y/c.txt"]),
        ("", "**/*.py", "", ["x/d.py"]),
        ("", "*.txt", "", ["a.txt"]),
        ("x/*.txt", "**/*", "x", ["a.txt", "b.txt"]),
        ("**/[bc].txt", "**/*", "x", ["b.txt", "y/c.txt"]),
        ("~/a.txt", "**/*", "", ["a.txt"]),
    ],
)
def test_a_path_stands_for_the_matching_files_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, pattern: str, root: str, expected: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, dict.fromkeys(("x/b.txt", "a.txt", "x/a.txt", "x/y/c.txt", "x/d.py"), "text"))
    found, files = find_files(path if path[:1] == "~" else str(tmp_path / path), pattern)
    assert (found, [file.relative_to(found).as_posix() for file in files]) == (tmp_path / root, expected)


@pytest.mark.parametrize(
    ("path", "pattern", "said"),
    [
        (".", "", r"data\.pattern '' is not a valid glob: .*; use one such as"),
        (".", "/x/*", r"data\.pattern '/x/\*' is not a valid glob: .*; use one such as"),
        ("nowhere.txt", "**/*", r"data\.path '.*nowhere"),
        ("*.nowhere", "**/*", r"data\.path '.*nowhere"),
        (".", "*.nowhere", r"data\.path '.*nowhere"),
    ],
)
def test_a_path_without_files_and_an_invalid_pattern_are_refused(
    tmp_path: Path, path: str, pattern: str, said: str
) -> None:
    write(tmp_path, {"a.txt": "a"})
    with pytest.raises(UsageError, match=said):
        find_files(str(tmp_path / path), pattern)


def test_the_default_corpus_is_the_standard_library_without_tests_tables_and_packages() -> None:
    root, files = find_files(None, "**/*")
    assert root == Path(sysconfig.get_paths()["stdlib"])
    below = [file.relative_to(root) for file in files]
    assert {Path("argparse.py"), Path("json/decoder.py"), Path("asyncio/events.py")} <= set(below)
    assert files == sorted(files)
    unwanted = {
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
    assert not [path for path in below if unwanted & set(path.parts)]
    assert not [path for path in below if path.name.startswith("_sysconfigdata") or path.suffix != ".py"]
    assert 5e6 < sum(file.stat().st_size for file in files) < 1e8


# Splitting.


def documents(folder: Path, split: str, percent: int = 10, share: int = 1) -> list[str]:
    """The documents of a split of every `share`th file."""
    root, files = find_files(str(folder), "**/*")
    found = read_split(root, files[::share], split, percent)
    assert measure_split(root, files[::share], split, percent) == len(found), "the size is known without reading it"
    *texts, rest = found.tobytes().decode().split("\0")
    assert rest == ""
    return texts


def test_many_files_are_divided_between_the_splits_as_whole_files_by_their_paths_alone(tmp_path: Path) -> None:
    one = numbered(tmp_path / "one", 300)
    everything = [file.read_text() for file in find_files(str(one), "**/*")[1]]
    train, held_out = documents(one, "train"), documents(one, "validation")
    assert sorted(train + held_out) == sorted(everything)
    assert train == [text for text in everything if text in set(train)]  # in the files' order
    assert 15 <= len(held_out) <= 45  # 10% of 300, within three standard deviations
    assert documents(one, "validation", share=3) == [text for text in everything[::3] if text in held_out]
    assert documents(numbered(tmp_path / "another" / "place", 300), "validation") == held_out
    for file in find_files(str(one), "**/*")[1]:
        file.write_text(file.read_text() + "changed")
    assert [text.removesuffix("changed") for text in documents(one, "validation")] == held_out
    shares = [set(documents(one, "validation", percent)) for percent in (5, 20, 50)]
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize(
    ("texts", "percent", "train", "validation"),
    [
        ({"a.txt": "0123456789" * 10}, 5, ["0123456789" * 9 + "01234"], ["56789"]),
        ({"a.txt": "0123456789", "b.txt": "abcdefghij"}, 20, ["01234567", "abcdefgh"], ["89", "ij"]),
        ({"a.txt": "", "b.txt": "bb", "c.txt": "", "d.txt": "dddd"}, 50, ["b", "dd"], ["b", "dd"]),
    ],
)
def test_the_ends_of_a_few_files_are_the_validation_split(
    tmp_path: Path, texts: dict[str, str], percent: int, train: list[str], validation: list[str]
) -> None:
    write(tmp_path, texts)
    assert [documents(tmp_path, split, percent) for split in ("train", "validation")] == [train, validation]


# Windows.


@pytest.mark.parametrize("length", [2 * S + 1, 100, 101, 102, 103, 104, 105, 106, 107, 257])
def test_every_window_of_all_but_two_windows_is_in_an_epoch_once_without_overlap(length: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, size=length).astype(np.uint8)  # windows of nine are unlike
    windows = Windows(data, S, 7)
    assert windows.count * S >= length - 2 * S - 1
    at = {data[start : start + S + 1].tobytes(): start for start in range(length - S)}
    for epoch in range(3):
        found = windows.read(range(epoch * windows.count, (epoch + 1) * windows.count))
        whole = torch.cat((found["tokens"], found["labels"][:, -1:]), dim=1).numpy().astype(np.uint8)
        starts = sorted(at[row.tobytes()] for row in whole)
        assert starts == list(range(starts[0], starts[0] + windows.count * S, S))
        assert starts[0] < S
        assert starts[-1] + S + 1 <= length


# Short texts.


def bytes_of(windows: RepeatedWindows, samples: range) -> bytes:
    found = windows.read(samples)
    assert torch.equal(found["labels"][:-1, -1], found["tokens"][1:, 0])
    assert torch.equal(found["labels"][:, :-1], found["tokens"][:, 1:])
    return bytes(found["tokens"].flatten().tolist())


@pytest.mark.parametrize("text", [b"x\0", b"abcdefg\0", b"0123456789abcde\0"])
def test_a_text_shorter_than_two_windows_is_repeated_without_end(text: bytes) -> None:
    windows = RepeatedWindows(np.frombuffer(text, np.uint8), S, 1)
    found = bytes_of(windows, range(30))
    offset = (text * 2).index(found[: len(text)])
    assert found == (text * 300)[offset : offset + 30 * S]


def test_every_epoch_has_each_short_document_once_in_an_order_of_its_own() -> None:
    documents = [b"one\0", b"two\0", b"six\0"]
    windows = RepeatedWindows(np.frombuffer(b"".join(documents), np.uint8), S, 1)
    found = bytes_of(windows, range(60))
    start = 12 - windows.offset
    epochs = [found[at : at + 12] for at in range(start, len(found) - 12, 12)]
    assert all(sorted(epoch[at : at + 4] for at in (0, 4, 8)) == sorted(documents) for epoch in epochs)
    assert len(set(epochs)) > 3
    assert bytes_of(windows, range(17, 23)) == found[17 * S : 23 * S]  # any sample can be read first
    other = RepeatedWindows(np.frombuffer(b"".join(documents), np.uint8), S, 2)
    assert bytes_of(other, range(60)) != found


class ShortTexts(DataSuite):
    """Three files; each split of them is shorter than a sample."""

    plugin = "text"
    settings = {"data.path": str(Path(__file__).with_name("short"))}
    splits_are_disjoint = False


@pytest.mark.parametrize("split", ["train", "validation"])
def test_short_texts_are_the_same_under_every_layout_and_resume_exactly(split: str) -> None:
    suite = ShortTexts()
    suite.test_labels_are_the_next_tokens(split)
    suite.test_samples_have_one_order_whatever_the_portions_and_micro_batches(split)
    suite.test_a_run_of_another_length_has_the_same_order_or_is_refused_the_state(split)
    suite.test_ranks_together_read_what_one_rank_reads(4, split)
    suite.test_it_resumes_exactly((1, 4), split)


def checked(path: Path, **trainer: int) -> list[str]:
    config: Any = SimpleNamespace(
        trainer=SimpleNamespace(**{"seq_length": S, "seed": 1, "eval_every": 1, **trainer}),
        checkpoint=SimpleNamespace(pretrained=None),
    )
    return Text(Text.Config(path=str(path))).check_data(config)


def test_a_split_that_is_repeated_is_reported_and_one_without_text_is_refused(tmp_path: Path, book: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 100)
    (sentence,) = checked(path)
    assert re.search(r"short\.txt': the validation split has 6 bytes, and .*=8 needs 17; .* repetitions", sentence)
    assert checked(path, eval_every=0) == []
    assert checked(book) == []
    path.write_text("")
    with pytest.raises(UsageError, match=r"short\.txt': the train split has no text; set data\.path to more text$"):
        checked(path)
    with pytest.raises(UsageError, match=r"the validation split has no text; .* or set trainer\.eval_every=0"):
        loader(path, "validation")


def test_files_that_are_no_text_are_reported_with_what_reads_them(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n' * 20)
    (sentence,) = checked(chats)
    assert f"the lines of '{chats}' are conversations" in sentence
    assert "add --data packed (docs/packed.md)" in sentence
    chats.write_text('{"text": "some"}\n' * 20)
    (sentence,) = checked(chats)
    assert "convert them with 'mplug data preprocess'" in sentence


def test_a_file_that_may_not_be_read_is_refused(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read every file
    with pytest.raises(UsageError, match=r"cannot read '.*book\.txt': permission denied"):
        checked(book)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".bin"])
def test_files_that_are_not_text_are_read_and_reported(
    book: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader(book)
    assert caplog.text == ""
    loader(book.rename(book.with_suffix(suffix)))
    (told,) = caplog.messages
    assert suffix in told
    assert "mplug data preprocess" in told


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert Bytes().decode(Bytes().encode("ü")[:1]) == "\ufffd"


# Tokens of a tokenizer plugin.


class Words:
    """A tokenizer of single characters, upper-cased; 200 ends a document."""

    vocab_size, eod = 201, 200

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(character.upper()) for character in text] for text in texts]


@pytest.mark.parametrize(("eod", "expected"), [(200, [65, 66, 200, 67, 200]), (None, [65, 66, 67])])
def test_each_document_is_encoded_and_followed_by_the_end_token_if_there_is_one(
    eod: int | None, expected: list[int]
) -> None:
    tokenizer: Any = Words()
    tokenizer.eod = eod
    assert tokens_of(np.frombuffer(b"ab\0c\0", dtype=np.uint8), tokenizer).tolist() == expected


@pytest.mark.parametrize("length", [3, 1000])
def test_samples_consist_of_the_tokens_of_the_named_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    path = tmp_path / "book.txt"
    path.write_text("x" * length)
    found = loader(path, tokenizer="bytes", validation_percent=50)
    assert found.vocab_size == 257
    tokens = next(iter(found.take(2)))["tokens"]
    assert set(tokens.unique().tolist()) <= {ord("x"), 256}
    is_repeated = "the train split has 2 tokens, and trainer.seq_length=8 needs 17" in caplog.text
    assert is_repeated == (length == 3)
    if is_repeated:
        assert 256 in tokens  # repeated: the end of the bytes plugin is no byte 0


def test_options_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.tokenizer is null; set data\.tokenizer"):
        Text(Text.Config(tokenizer_options={"path": "x"})).configure()


def test_bytes_for_a_published_model_with_more_tokens_are_reported(tmp_path: Path, book: Path) -> None:
    plugin, published = Text(Text.Config(path=str(book))), tmp_path / "published"
    published.mkdir()

    def beginning_with_tokens(vocab_size: int) -> list[str]:
        run: Any = SimpleNamespace(
            trainer=SimpleNamespace(seq_length=S, eval_every=0),
            checkpoint=SimpleNamespace(pretrained=SimpleNamespace(path=str(published))),
            model=SimpleNamespace(vocab_size=vocab_size),
        )
        return plugin.check_data(run)

    assert beginning_with_tokens(400) == []  # the folder of a run
    (published / "config.json").write_text("{}")
    assert beginning_with_tokens(256) == []
    (sentence,) = beginning_with_tokens(400)
    assert f"the model of '{published}' has 400 tokens; name its tokenizer with data.tokenizer" in sentence
