"""The record of a tokenizer: kept beside the data, read again, and refused where it is no longer what it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mplug import UsageError
from mplug_tokenization import TokenizerRecord, describe_tokenizer, keep_tokenizer, load_tokenizer, read_tokenizer

WORDS = Path(__file__).parent / "third_party" / "nova-glyph" / "tests" / "words.txt"


@pytest.fixture
def kept(tmp_path: Path, plant: Callable[..., None]) -> Path:
    """The prefix of data beside which glyph's record stands; its first file is gone."""
    plant("nova-glyph")
    words = tmp_path / "source" / "words.txt"
    words.parent.mkdir()
    words.write_bytes(WORDS.read_bytes())
    (tmp_path / "data").mkdir()
    keep_tokenizer(describe_tokenizer("glyph", {"path": str(words)}), tmp_path / "data" / "corpus")
    words.unlink()
    return tmp_path / "data" / "corpus"


def read(prefix: Path) -> TokenizerRecord:
    record = read_tokenizer(prefix)
    assert record is not None
    return record


def test_data_stays_readable_where_it_is_moved_and_the_first_file_is_gone(kept: Path, tmp_path: Path) -> None:
    moved = kept.parent.rename(tmp_path / "elsewhere") / "corpus"
    tokenizer = load_tokenizer(read(moved))
    assert tokenizer.decode(tokenizer.encode("the plain text")) == "the plain text"
    assert (tokenizer.vocab_size, tokenizer.eod) == (265, 256)


def test_the_fingerprint_is_of_contents_and_options_and_not_of_places(kept: Path, tmp_path: Path) -> None:
    first = describe_tokenizer("glyph", {"path": str(WORDS)})
    assert read(kept).fingerprint == first.fingerprint
    other = tmp_path / "other.txt"
    other.write_text("other\nwords\n")
    assert describe_tokenizer("glyph", {"path": str(other)}).fingerprint != first.fingerprint


def test_data_without_a_record_has_none(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path / "corpus") is None


def test_a_copy_that_is_gone_or_changed_is_refused_by_its_name(kept: Path) -> None:
    record, (copy,) = read(kept), kept.parent.glob("corpus.tokenizer.path.*")
    copy.write_text(copy.read_text() + "more\n")
    with pytest.raises(UsageError, match=r"words\.txt' has changed since the data was made with it \(sha256"):
        load_tokenizer(record)
    copy.unlink()
    with pytest.raises(UsageError, match=r"cannot read path '.*words\.txt': No such file"):
        load_tokenizer(record)


def test_a_record_whose_plugin_is_not_installed_says_which_was(kept: Path) -> None:
    with pytest.raises(UsageError, match="was edited"):
        load_tokenizer({**read(kept).as_mapping(), "name": "glyps"})
    keep_tokenizer(TokenizerRecord(**{**read(kept).__dict__, "name": "glyps"}), kept)
    said = r"made with tokenizer 'glyps' of nova-glyph 1\.0\.0: no plugin 'glyps' .* did you mean 'glyph'\?"
    with pytest.raises(UsageError, match=said):
        load_tokenizer(read(kept))


FILE = {"path": "/etc/hostname", "name": "hostname", "sha256": ""}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda _: "{", "is not a valid tokenizer record"),
        (lambda _: {"name": "glyph"}, "is not a valid tokenizer record: it lacks 'files'"),
        (lambda said: {**said, "vocab_size": float("nan")}, "vocab_size: "),
        (lambda said: {**said, "vocab_size": -1}, "vocab_size: "),
        (lambda said: {**said, "files": []}, "files: "),
        (lambda said: {**said, "files": {"path": FILE}}, "was edited"),
        (lambda said: {**said, "name": None}, "name: "),
        (
            lambda said: {**said, "files": {"path": {**said["files"]["path"], "path": "../words.txt"}}},
            "for 'path', but the file must be in the same folder",
        ),
    ],
)
def test_a_record_whose_fields_are_not_those_of_one_is_refused(kept: Path, changed: Any, reason: str) -> None:
    path = kept.with_name("corpus.tokenizer.json")
    found = changed(json.loads(path.read_text()))
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(UsageError, match=rf"corpus\.tokenizer\.json' .*{reason}"):
        read(kept)


def test_a_release_that_makes_another_vocabulary_is_refused(kept: Path, plant: Callable[..., None]) -> None:
    plant("nova-glyph", "self.vocab_size = END + 1 + len(self.words)", "self.vocab_size = END + 2 + len(self.words)")
    said = r"with vocab_size=265 and eod=256, but the installed nova-glyph 1\.0\.0 has vocab_size=266 and"
    with pytest.raises(UsageError, match=said):
        load_tokenizer(read(kept))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("glyhp", {}, "no plugin 'glyhp' of kind 'tokenizers' is installed; did you mean 'glyph'"),
        ("glyph", {}, r"tokenizers/glyph: path \(--tokenizer\): is required"),
        ("glyph", {"pth": 1}, r"tokenizers/glyph: pth \(--tokenizer\): unknown field; did you mean 'path'"),
        ("glyph", {"path": "nowhere.txt"}, r"path 'nowhere\.txt' is no list of words"),
    ],
)
def test_a_wrong_name_or_option_is_refused(kept: Path, name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        describe_tokenizer(name, options)
