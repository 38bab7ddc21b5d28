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

from mplug import MapLoader, Mesh, MicroBatch, UsageError
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


def loader(path: Path, split: str = "train") -> MapLoader:
    config = SimpleNamespace(trainer=SimpleNamespace(seq_length=S, seed=1))
    run: Any = SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=2)
    return Text(Text.Config(path=str(path))).build_loader(run, split)  # type: ignore[arg-type]


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def numbered(folder: Path, number: int) -> Path:
    """A folder of files, each of which says which one it is."""
    for n in range(number):
        path = folder / f"part{n % 3}" / f"{n:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{n}>" * 5)
    return folder


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, size=1000).astype(np.uint8)))
    return path


# Finding files.


def names(found: tuple[Path, list[Path]]) -> list[str]:
    root, files = found
    return [file.relative_to(root).as_posix() for file in files]


def test_a_folder_stands_for_all_files_below_it_sorted(tmp_path: Path) -> None:
    write(tmp_path, b_txt="b", a__z_txt="z", a__b__c_py="c", a_txt="a")
    assert names(find_files(str(tmp_path), "**/*")) == sorted(["a.txt", "a/b/c.py", "a/z.txt", "b.txt"], key=Path)


def test_a_pattern_chooses_files_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, b_txt="b", a__z_txt="z", a__c_py="c")
    assert names(find_files(str(tmp_path), "**/*.txt")) == ["a/z.txt", "b.txt"]
    assert names(find_files(str(tmp_path), "*.txt")) == ["b.txt"]


def test_a_glob_stands_for_the_matching_files_sorted(tmp_path: Path) -> None:
    write(tmp_path, x__b_txt="b", x__a_txt="a", x__y__c_txt="c", x__d_py="d")
    root, files = find_files(str(tmp_path / "x" / "*.txt"), "**/*")
    assert (root, [file.name for file in files]) == (tmp_path / "x", ["a.txt", "b.txt"])
    root, files = find_files(str(tmp_path / "**" / "*.txt"), "**/*")
    assert (root, [file.name for file in files]) == (tmp_path / "x", ["a.txt", "b.txt", "c.txt"])


def test_the_home_folder_may_be_written_as_a_tilde(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(book.parent))
    assert names(find_files("~/book.txt", "**/*")) == ["book.txt"]


@pytest.mark.parametrize("pattern", ["", "/x/*"])
def test_an_invalid_pattern_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(
        UsageError, match=rf"data\.pattern '{re.escape(pattern)}' is not a valid glob: .*; use one such as"
    ):
        find_files(str(tmp_path), pattern)


@pytest.mark.parametrize(("path", "pattern"), [("nowhere.txt", "**/*"), ("*.nowhere", "**/*"), (".", "*.nowhere")])
def test_the_error_names_a_path_without_files(tmp_path: Path, path: str, pattern: str) -> None:
    write(tmp_path, a_txt="a")
    with pytest.raises(UsageError, match=r"data\.path '.*nowhere"):
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


def text_of(root: Path, files: list[Path], split: str, percent: int = 10) -> str:
    return read_split(root, files, split, percent).tobytes().decode()


def documents(root: Path, files: list[Path], split: str, percent: int = 10) -> list[str]:
    return text_of(root, files, split, percent).split("\0")[:-1]


def test_many_files_are_divided_between_the_splits_as_whole_files(tmp_path: Path) -> None:
    root, files = find_files(str(numbered(tmp_path, 300)), "**/*")
    train, validation = documents(root, files, "train"), documents(root, files, "validation")
    everything = [file.read_text() for file in files]
    assert sorted(train + validation) == sorted(everything)
    assert train == [text for text in everything if text in set(train)]  # in the files' order
    assert 15 <= len(validation) <= 45  # 10% of 300, within three standard deviations


def test_the_split_of_a_file_depends_only_on_its_path_below_the_root(tmp_path: Path) -> None:
    root, files = find_files(str(numbered(tmp_path / "one", 120)), "**/*")
    held_out = set(documents(root, files, "validation"))
    fewer = [file for number, file in enumerate(files) if number % 3]
    assert set(documents(root, fewer, "validation")) == held_out & {file.read_text() for file in fewer}
    moved_root, moved = find_files(str(numbered(tmp_path / "another" / "place", 120)), "**/*")
    assert set(documents(moved_root, moved, "validation")) == held_out
    for file in files:
        file.write_text(file.read_text() + "changed")
    assert {text.removesuffix("changed") for text in documents(root, files, "validation")} == held_out


def test_a_larger_validation_share_includes_the_files_of_a_smaller_share(tmp_path: Path) -> None:
    root, files = find_files(str(numbered(tmp_path, 200)), "**/*")
    shares = [set(documents(root, files, "validation", percent)) for percent in (5, 20, 50)]
    assert shares[0] < shares[1] < shares[2]


def test_the_end_of_a_single_file_is_the_validation_split(book: Path) -> None:
    text = book.read_text()
    assert text_of(book.parent, [book], "train", 5) == text[:950] + "\0"
    assert text_of(book.parent, [book], "validation", 5) == text[950:] + "\0"


def test_the_ends_of_a_few_files_are_the_validation_split(tmp_path: Path) -> None:
    root, files = find_files(str(write(tmp_path, a_txt="0123456789", b_txt="abcdefghij")), "**/*")
    assert text_of(root, files, "train", 20) == "01234567\0abcdefgh\0"
    assert text_of(root, files, "validation", 20) == "89\0ij\0"


def test_a_separator_ends_every_document_and_empty_files_have_none(tmp_path: Path) -> None:
    root, files = find_files(str(write(tmp_path, a_txt="", b_txt="bb", c_txt="", d_txt="dddd")), "**/*")
    assert text_of(root, files, "train", 50) == "b\0dd\0"
    assert text_of(root, files, "validation", 50) == "b\0dd\0"


# Windows.


def take(found: MapLoader, number: int) -> list[MicroBatch]:
    return list(found.take(number))


def stream(length: int) -> np.ndarray:
    """Bytes of which every window of nine is unlike any other."""
    return np.random.default_rng(1).integers(0, 256, size=length).astype(np.uint8)


@pytest.mark.parametrize("length", [2 * S + 1, 100, 101, 104, 105, 257])
def test_every_window_is_in_an_epoch_once_and_windows_do_not_overlap(length: int) -> None:
    data = stream(length)
    windows = Windows(data, S, 7)
    at = {data[start : start + S + 1].tobytes(): start for start in range(length - S)}
    for epoch in range(3):
        found = windows.read(range(epoch * windows.count, (epoch + 1) * windows.count))
        whole = torch.cat((found["tokens"], found["labels"][:, -1:]), dim=1).numpy().astype(np.uint8)
        starts = sorted(at[row.tobytes()] for row in whole)
        assert starts == list(range(starts[0], starts[0] + windows.count * S, S))
        assert starts[0] < S
        assert starts[-1] + S + 1 <= length


def test_an_epoch_uses_all_but_the_bytes_of_two_windows() -> None:
    for length in range(2 * S + 1, 200):
        assert Windows(stream(length), S, 1).count * S >= length - 2 * S - 1


# Short texts.


def bytes_of(windows: RepeatedWindows, samples: range) -> bytes:
    """The text that consecutive samples cover."""
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


def test_the_size_of_a_split_is_known_without_reading_it(tmp_path: Path) -> None:
    write(tmp_path / "few", a_txt="0123456789", b_txt="abcdefghi", c_txt="", d_txt="x")
    numbered(tmp_path / "many", 60)
    for name in ("few", "many"):
        root, files = find_files(str(tmp_path / name), "**/*")
        for split in ("train", "validation"):
            for percent in (5, 20, 50):
                assert measure_split(root, files, split, percent) == len(read_split(root, files, split, percent))


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


# Bytes and text.


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert Bytes().decode(Bytes().encode("ü")[:1]) == "\ufffd"


# Tokens of a tokenizer plugin.


class Words:
    """A tokenizer of single characters, upper-cased; 200 ends a document."""

    vocab_size, eod = 201, 200

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(character.upper()) for character in text] for text in texts]


def test_each_document_is_encoded_and_followed_by_the_end_token() -> None:
    stream = np.frombuffer(b"ab\0c\0", dtype=np.uint8)
    tokenizer: Any = Words()
    assert tokens_of(stream, tokenizer).tolist() == [65, 66, 200, 67, 200]


def test_a_tokenizer_without_an_end_of_documents_adds_none() -> None:
    tokenizer: Any = Words()
    tokenizer.eod = None
    assert tokens_of(np.frombuffer(b"ab\0c\0", dtype=np.uint8), tokenizer).tolist() == [65, 66, 67]


@pytest.mark.parametrize("length", [3, 1000])
def test_samples_consist_of_the_tokens_of_the_named_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    path = tmp_path / "book.txt"
    path.write_text("x" * length)
    config = SimpleNamespace(trainer=SimpleNamespace(seq_length=S, seed=1))
    run: Any = SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=2)
    plugin = Text(Text.Config(path=str(path), tokenizer="bytes", validation_percent=50))
    found = plugin.build_loader(run, "train")
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


def starting_with(folder: Path, vocab_size: int) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(seq_length=S, eval_every=0),
        checkpoint=SimpleNamespace(pretrained=SimpleNamespace(path=str(folder))),
        model=SimpleNamespace(vocab_size=vocab_size),
    )


def test_bytes_for_a_published_model_with_more_tokens_are_reported(tmp_path: Path, book: Path) -> None:
    plugin, published = Text(Text.Config(path=str(book))), tmp_path / "published"
    published.mkdir()
    assert plugin.check_data(starting_with(published, 400)) == []  # the folder of a run
    (published / "config.json").write_text("{}")
    assert plugin.check_data(starting_with(published, 256)) == []
    (sentence,) = plugin.check_data(starting_with(published, 400))
    assert f"the model of '{published}' has 400 tokens; name its tokenizer with data.tokenizer" in sentence
