"""mplug data as a command, and what it tells of corpora: inspect, merge, verify, blend; and learning a tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from mplug_indexed.corpora import blend, describe, merge, sample, verify
from mplug_indexed.files import Writer
from mplug_indexed.preprocess.job import Job, preprocess
from mplug_indexed.preprocess.sources import find_sources
from mplug_indexed.training import train

from mplug import RunError, UsageError
from mplug.cli import main
from mplug_testing import CommandSuite
from mplug_tokenization import describe_tokenizer, load_tokenizer


class TestData(CommandSuite):
    plugin = "data"
    refused = (
        ("preprocess", "nowhere.jsonl", "--tokenizer", "bytes"),
        ("preprocess", "nowhere.jsonl", "--tokenizer", "byte"),
        ("preprocess", "nowhere.jsonl", "--tokenizer", __file__),
        ("preprocess", f"{'n' * 300}.jsonl", "--tokenizer", "bytes"),
        ("preprocess", "nowhere.jsonl", "--tokenizer", "bytes", "--set", "eod"),
        ("preprocess", "nowhere.jsonl", "--tokenizer", "bytes", "--output", ".."),
        ("preprocess", "nowhere.jsonl", "--tokenizer", "bytes", "--chunk-mib", "nan"),
        ("inspect", "nowhere"),
        ("inspect", ""),
        ("merge", "nowhere", "--output", "whole"),
        ("verify", "nowhere"),
        ("blend", "nowhere=1"),
        ("blend", "nowhere"),
        ("blend", "nowhere=1", "--write", "."),
        ("train-tokenizer", "nowhere.jsonl", "--vocab-size", "300"),
        ("train-tokenizer", "nowhere.jsonl", "--vocab-size", "300", "--output", ".", "--overwrite"),
        ("train-tokenizer", "nowhere.jsonl", "--vocab-size", "100000000000"),
    )


def corpus(prefix: Path, *texts: str, tokenizer: str = "bytes", **options: Any) -> Path:
    path = prefix.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    record = describe_tokenizer(tokenizer, options)
    preprocess(Job(prefix, find_sources([str(path)], None, None), record, append_eod=True))
    return prefix


def test_show_prints_the_numbers_and_the_text_of_a_corpus(tmp_path: Path) -> None:
    found = describe(corpus(tmp_path / "a", "one", "zwölf", "3" * 50))
    assert found.row == (str(tmp_path / "a"), "3", "3", "62", "uint16", "124", "bytes", "257", "256")
    assert list(sample(found, 1, 5, 10)) == [(1, "zwölf"), (2, "3" * 10 + " ...")]
    with pytest.raises(UsageError, match=r"--document 3: .* has 3 documents, numbered from 0"):
        list(sample(found, 3, 1, 10))


def test_show_prints_the_tokens_of_a_corpus_without_a_record(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", np.int32) as writer:
        writer.add_document(np.array([5, 6, 7]), [2, 1])
    found = describe(tmp_path / "a")
    assert found.row[1:5] == ("1", "2", "3", "int32")
    assert list(sample(found, 0, 1, 10)) == [(0, "5 6 7")]


def test_the_errors_for_a_text_file_and_for_a_misspelt_corpus_state_the_remedy(tmp_path: Path) -> None:
    corpus(tmp_path / "a", "one")
    with pytest.raises(UsageError, match=r"a\.jsonl' is not tokenized; run 'mplug data preprocess .*a\."):
        describe(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match=r"b\.idx' does not exist; use the path of .* \(existing: .*/a\)"):
        describe(tmp_path / "b")


def test_a_merged_corpus_has_all_documents_in_order_and_their_tokenizer(tmp_path: Path) -> None:
    one, two = corpus(tmp_path / "one", "a", "b"), corpus(tmp_path / "two", "c")
    corpus(tmp_path / "all", "a", "b", "c")
    merge([str(one), str(two)], tmp_path / "merged", overwrite=False)
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(f"{tmp_path}/all{suffix}").read_bytes()
    with pytest.raises(UsageError, match=r"merged' exists; use another --output"):
        merge([str(one)], tmp_path / "merged", overwrite=False)
    with pytest.raises(UsageError, match="is one of the merged corpora"):
        merge([str(one)], one, overwrite=True)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_corpus_may_be_named_by_either_of_its_files(tmp_path: Path, suffix: str) -> None:
    prefix = corpus(tmp_path / "a", "one")
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(main, ["data", command, f"{prefix}{suffix}"])
        assert result.exit_code == 0, result.output
        assert str(prefix) in result.output
        assert ".bin" not in result.output


def test_every_command_refuses_a_damaged_index(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", "one", "two", "three")
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(34 + 4)
        file.write((-5).to_bytes(4, "little", signed=True))
    for act in (
        lambda: describe(prefix),
        lambda: merge([str(prefix)], tmp_path / "all", overwrite=False),
        lambda: blend([f"{prefix}=1"], None, by_size=False),
    ):
        with pytest.raises(UsageError, match=r"a\.idx' is damaged: sequence 1 has -5 tokens"):
            act()


OTHER = json.dumps({"files": {"b.bin": {"bytes": 1, "sha256": "0" * 64}}})
OF_NO_NUMBER = '{"files": {"a.bin": {"bytes": NaN, "sha256": "0"}}}'
NO_CHECKSUMS = "is damaged: it has no checksums; copy it again"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        *((report, NO_CHECKSUMS) for report in ("[]", "{", '{"files": 3}', "{}", OF_NO_NUMBER, "[" * 100_000)),
        (OTHER, r"has no checksum of 'a\.bin': it belongs to another data set"),
    ],
    ids=lambda text: text[:30],
)
def test_a_report_that_is_damaged_or_of_other_files_is_refused(tmp_path: Path, report: str, said: str) -> None:
    prefix = corpus(tmp_path / "a", "one")
    (tmp_path / "a.preprocess.json").write_text(report)
    with pytest.raises(RunError, match=rf"a\.preprocess\.json' {said}"):
        verify(str(prefix), None)


def test_corpora_named_twice_are_refused_and_those_without_a_record_merge_to_one_without(tmp_path: Path) -> None:
    whole = corpus(tmp_path / "whole", "one")
    with pytest.raises(
        UsageError, match=r"whole' is given twice; use it once, else the result has its documents twice"
    ):
        merge([str(whole), str(whole)], tmp_path / "all", overwrite=False)
    with pytest.raises(UsageError, match=r"whole' is given twice; use it once, with the sum of its weights"):
        blend([f"{whole}=1", f"{whole}.bin=2"], None, by_size=False)
    with Writer(tmp_path / "bare", np.uint16) as writer:
        writer.add_documents(np.array([1]), [1])
    merge([str(tmp_path / "bare")], whole, overwrite=True)
    assert describe(whole).tokenizer is None


def trained(tmp_path: Path, name: str, size: int) -> str:
    texts = tmp_path / "words.jsonl"
    texts.write_text("".join(json.dumps({"text": f"word {n} and word {n * n}"}) + "\n" for n in range(200)))
    path = tmp_path / name
    train(find_sources([str(texts)], None, None), path, size, ("<|endoftext|>",), "text", None, overwrite=False)
    return str(path)


def test_corpora_of_two_tokenizers_are_neither_merged_nor_blended(tmp_path: Path) -> None:
    small, large = trained(tmp_path, "small.json", 270), trained(tmp_path, "large.json", 300)
    one = corpus(tmp_path / "one", "a word", tokenizer="huggingface", path=small)
    two = corpus(tmp_path / "two", "a word", tokenizer="huggingface", path=large)
    for act in (
        lambda: merge([str(one), str(two)], tmp_path / "all", overwrite=False),
        lambda: blend([f"{one}=1", f"{two}=1"], None, by_size=False),
    ):
        with pytest.raises(UsageError, match="so their token numbers differ in meaning"):
            act()


def test_the_tokenizers_copy_next_to_the_data_is_used_and_a_changed_copy_is_refused(tmp_path: Path) -> None:
    path = Path(trained(tmp_path, "learnt.json", 300))
    prefix = corpus(tmp_path / "one", "a word and a word", tokenizer="huggingface", path=str(path))
    path.unlink()
    assert list(sample(describe(prefix), 0, 1, 99)) == [(0, "a word and a word")]
    (copy,) = tmp_path.glob("one.tokenizer.*.learnt.json")
    copy.write_text(copy.read_text() + " ")
    for act in (
        lambda: list(sample(describe(prefix), 0, 1, 99)),
        lambda: merge([str(prefix)], tmp_path / "all", overwrite=False),
    ):
        with pytest.raises(UsageError, match=r"has changed since the data was made with it \(sha256"):
            act()
    copy.unlink()
    with pytest.raises(UsageError, match=r"cannot read .*learnt\.json': No such file"):
        merge([str(prefix)], tmp_path / "all", overwrite=False)
    assert not list(tmp_path.glob("all*"))


def test_verify_finds_a_changed_byte_a_token_beyond_the_vocabulary_and_a_truncated_file(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", "one", "two", "three")
    assert "every token is below 257; checksums match the report" in verify(str(prefix), None)
    whole = (tmp_path / "a.bin").read_bytes()
    for data, said in (
        (b"\x01" + whole[1:], r"a\.bin' is damaged: its size or sha256 differs"),
        (whole[:10] + b"\x01\x01" + whole[12:], r"a\.bin' has token 257 in sequence 1, and the vocabulary has 257"),
        (whole[:-2], r"a\.bin' has 26 bytes, and 'a\.idx' needs 28"),
    ):
        (tmp_path / "a.bin").write_bytes(data)
        with pytest.raises(RunError, match=said):
            verify(str(prefix), None)
    (tmp_path / "a.bin").write_bytes(whole)
    with pytest.raises(RunError, match="has token 256 in sequence 0, and the vocabulary has 256"):
        verify(str(prefix), 256)


def test_the_report_of_a_blend_has_shares_of_tokens_and_epochs(tmp_path: Path) -> None:
    one, two = corpus(tmp_path / "one", "x" * 99), corpus(tmp_path / "two", "x" * 299)
    mixed = blend([f"{one}=3", f"{two}=1"], 800, by_size=False)
    assert mixed.rows == [
        (str(one), "3", "0.7500", "100", "600", "6.00"),
        (str(two), "1", "0.2500", "300", "200", "0.67"),
    ]
    assert blend([f"{one}=1", f"{two}=1"], None, by_size=True).shares == [0.25, 0.75]
    mixed.write(tmp_path / "blend.yaml")
    assert yaml.safe_load((tmp_path / "blend.yaml").read_text()) == {
        "data": {"name": "indexed", "path": {str(one): 0.75, str(two): 0.25}},
        "model": {"vocab_size": 257},
    }
    small = blend([f"{one}=1e-9", f"{two}=1"], None, by_size=False).as_mapping()
    assert small["data"]["path"][str(one)] == pytest.approx(1e-9)
    for wrong in ("one", f"{one}=0", f"{one}=x", f"{one}=nan", f"{one}="):
        with pytest.raises(UsageError, match="write it as PREFIX=WEIGHT"):
            blend([wrong], None, by_size=False)
    with pytest.raises(UsageError, match="the sum of the weights overflows"):
        blend([f"{one}=1e308", f"{two}=1e308"], None, by_size=False)


def test_a_trained_tokenizer_encodes_the_texts_words_and_all_other_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(describe_tokenizer("huggingface", {"path": trained(tmp_path, "learnt.json", 300)}))
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 0)
    assert len(tokenizer.encode("word")) == 1
    assert tokenizer.decode(tokenizer.encode("世界 🌍")) == "世界 🌍"


@pytest.mark.parametrize(
    ("output", "size", "special", "said"),
    [
        ("texts.jsonl", 300, ("<e>",), r"texts\.jsonl' exists"),
        ("b", 300, ("<e>",), "use other inputs, or correct --key or --format"),
        ("b", 300, ("",), "--special '' is too short to be distinguished from text"),
        ("b", 300, ("<e>",) * 2, "--special '<e>' is given twice; name each special token once"),
        ("b", 256, ("<e>",), "--vocab-size 256 is too small for bytes and special tokens; use 257"),
    ],
)
def test_a_tokenizer_that_cannot_be_trained_is_refused(
    tmp_path: Path, output: str, size: int, special: tuple[str, ...], said: str
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": ""}\n{"no": 1}\n')
    with pytest.raises(UsageError, match=said):
        train(find_sources([str(texts)], None, None), tmp_path / output, size, special, "text", None, overwrite=False)
