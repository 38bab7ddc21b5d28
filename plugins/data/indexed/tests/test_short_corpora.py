"""Data sets that are bad, too short for a run, or damaged."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("tokenizers")

from indexed_files import EOD, FOLDER, ONE, REARRANGED, TWO, S, build, taken, write
from mplug_indexed import Indexed
from mplug_indexed.files import idx_path

from mplug import UsageError

# Bad inputs: one sentence each, before launch where it can be known.


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"path": "nowhere/corpus"}, r"'nowhere/corpus\.idx' does not exist; use the path of an existing"),
        ({"path": ONE, "split": "0,1"}, r"data\.split '0,1' has no share for train; set one above 0"),
        ({"path": ONE, "split": "1,0"}, r"has no share for validation; set one above 0, or set trainer\.eval_every"),
        ({"path": ONE, "split": "1,0.0001"}, r"has 300 sequences, and .* assigns none of them to validation"),
        ({"path": {ONE: 1, TWO: 2}, "samples": "epoch"}, r"data\.samples=epoch does not support weights in data"),
        (
            {"path": ONE, "eod_mask_loss": True},
            r"data\.eod_mask_loss=true needs a token that ends .*set data\.eod_token",
        ),
        ({"path": ONE, "reset_attention": True}, r"data\.reset_attention=true needs a token that ends documents"),
        ({"path": [ONE, f"{ONE}.bin"]}, r"data\.path has '.*' twice; use it once$"),
        ({"path": {ONE: 1, f"{ONE}.idx": 2}}, r"data\.path has '.*' twice; use it once, with the sum of its weights"),
        ({"path": {"": 1}}, r"'' is not a data set; use the path of its files without \.bin and \.idx"),
        ({"path": ONE, "vocab_size": 300, "eod_token": 300}, r"data\.eod_token=300 is not in the vocabulary of 300"),
        (
            {"path": ONE, **REARRANGED, "fim_rate": 0.5, "fim_suffix_token": 301},
            r"data\.fim_suffix_token=301 is not in",
        ),
    ],
)
def test_bad_data_is_refused_before_launch(config: dict[str, Any], sentence: str) -> None:
    trainer = SimpleNamespace(seed=1, eval_every=1, seq_length=S)
    run: Any = SimpleNamespace(trainer=trainer, model=SimpleNamespace(vocab_size=256))
    plugin = Indexed(Indexed.Config(**config))
    with pytest.raises(UsageError, match=sentence) as refused:
        (plugin.configure(run), plugin.check_data(run))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"path": ""}, "path is empty; set it to a data set"),
        ({"path": {"a": 0, "b": 1}}, "path: 'a' has the weight 0; use a finite weight above 0, or remove it"),
        ({"path": {"a": float("nan")}}, "path: 'a' has the weight nan"),
        ({"path": {"a": float("inf")}}, "path: 'a' has the weight inf"),
        ({"path": {"a": "much"}}, "'a' has the weight 'much'; use a number above 0"),
        ({"path": {"a": 1e308, "b": 1e308}}, "sum of the weights in path overflows"),
        ({"path": [0.3, "a", 0.7, "b"]}, "a list has only paths; write weights as a mapping"),
        ({"path": ["a", None]}, "must be a path, a list of paths or a mapping from paths to weights"),
        ({"path": "a", "cache": ""}, "at least 1 character"),
        ({"path": "a", "fim_rate": 0.5}, "fim_rate needs fim_prefix_token, fim_middle_token and fim_suffix_token"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Indexed.Config(**config)


@pytest.mark.parametrize(
    ("documents", "config", "sentence"),
    [
        ([[1] * 60], {"samples": 10**13}, r"the order of .* samples needs .* GiB.* set a smaller data\.samples"),
        ([], {}, r"data' has no documents; remove it, or preprocess its texts again"),
        ([[], []], {}, r"data' has no tokens in this part of data\.split"),
        ([[0.5] * 50], {}, "data' contains float32 numbers; use a data set of integer tokens"),
        ([[1] * 20 + [256] + [1] * 20], {}, "of '.*data' has token 256, and the vocabulary has 256"),
        ([[1] * 20 + [60_000] + [1] * 20], {}, "of '.*data' has token 60000, and the vocabulary has 256"),
        (
            [[1, EOD] * 20],
            {"eod_token": EOD, "reset_attention": True, "samples": 1},
            r"has 8 documents, and the maximum is 2; set data\.max_documents=8",
        ),
    ],
)
def test_data_that_no_loader_can_read_is_refused(
    tmp_path: Path, documents: list[Any], config: dict[str, Any], sentence: str
) -> None:
    dtype = np.float32 if documents == [[0.5] * 50] else np.uint16
    path = str(write(tmp_path / "data", documents, dtype))
    with pytest.raises(UsageError, match=sentence):
        taken(build({"path": path, "split": "1", **config}), 2)


def test_a_blend_beyond_the_machines_memory_or_of_too_few_samples_and_a_large_seed_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the order of .* samples needs .* GiB.* set a smaller data\.samples"):
        build({"path": {ONE: 1, TWO: 2}, "split": "1", "samples": 10**13})
    with pytest.raises(UsageError, match=r"trainer\.seed=4294967296 is too large"):
        build({"path": ONE, "split": "1"}, seed=2**32)
    paths = {str(write(FOLDER / f"b{n}", [np.arange(1, 200)])): 0.9 if n == 0 else 0.001 for n in range(80)}
    with pytest.raises(UsageError, match=r"the blend needs \d+ samples of '.*b0'.*: 10 samples are too few for 80"):
        build({"path": paths, "split": "1", "samples": 10})


@pytest.mark.parametrize("samples", ["run", "epoch", 5])
def test_a_corpus_shorter_than_a_sample_is_repeated_in_every_order(samples: str | int) -> None:
    path = str(write(FOLDER / "short", [[1, 2, 3]]))
    found = taken(build({"path": path, "split": "1", "samples": samples}), 40)
    for tokens, labels in zip(found["tokens"].tolist(), found["labels"].tolist(), strict=True):
        row = [*tokens, labels[-1]]
        assert row == [(row[0] - 1 + place) % 3 + 1 for place in range(S + 1)]
        assert labels[:-1] == tokens[1:]


def test_short_documents_are_shuffled_over_the_epochs_that_a_sample_needs() -> None:
    path = str(write(FOLDER / "shorts", [[1, 1], [2, 2], [3, 3]]))
    found = taken(build({"path": path, "split": "1", "samples": "epoch"}), 12)
    assert found["tokens"].shape == (12, S)
    assert len({tuple(row) for row in found["tokens"].tolist()}) > 8, "every round is drawn with another seed"
    loader = build({"path": path, "split": "1", "samples": "epoch"})
    taken(loader, 5)
    resumed = build({"path": path, "split": "1", "samples": "epoch"}, shard=(1, 2))
    resumed.load_state_dict(loader.state_dict())
    assert taken(resumed, 4)["tokens"].tolist() == found["tokens"][7:9].tolist()


def test_a_short_corpus_beside_a_long_one_gives_as_many_samples_as_its_epochs_need() -> None:
    path = str(write(FOLDER / "short", [[1, 2, 3]]))
    loader = build({"path": [ONE, path], "split": "1", "samples": "epoch"})
    assert [epochs.number for epochs in loader.order.epochs(None)] == [1, 6]  # 17 tokens from 3
    assert loader.samples_per_epoch is None
    assert len(taken(loader, loader.order.size)["sample_ids"]) == loader.order.size


def test_repeated_data_is_reported_with_numbers_and_a_run_is_prepared_without_its_data() -> None:
    trainer = SimpleNamespace(seed=1, eval_every=0, seq_length=S)
    run: Any = SimpleNamespace(trainer=trainer, model=SimpleNamespace(vocab_size=256))
    path = str(write(FOLDER / "short", [[1, 2, 3]]))
    (sentence,) = Indexed(Indexed.Config(path=path, split="1")).check_data(run)
    assert "short' has 3 tokens, and a sample of trainer.seq_length=16 takes 17; samples are cut from its" in sentence
    assert Indexed(Indexed.Config(path=ONE, split="1")).check_data(run) == []
    Indexed(Indexed.Config(path="moved")).configure(run)


def test_a_damaged_index_is_refused_when_it_is_first_used_and_later() -> None:
    path = write(FOLDER / "damaged", [np.arange(1, 60), np.arange(1, 60), [1]])
    whole = idx_path(path).read_bytes()
    damaged, sentence = bytearray(whole), r"damaged\.idx' is damaged: sequence 1 has 59 tokens at byte 1000000000"
    struct.pack_into("<q", damaged, 34 + 3 * 4 + 8, 10**9)
    idx_path(path).write_bytes(damaged)
    with pytest.raises(UsageError, match=sentence):
        build({"path": str(path), "split": "1"})
    idx_path(path).write_bytes(whole)
    taken(build({"path": str(path), "split": "1"}), 4)  # now the cache has indices of these lengths
    idx_path(path).write_bytes(damaged)
    with pytest.raises(UsageError, match=sentence):
        taken(build({"path": str(path), "split": "1"}), 6)
