"""The loader: the data suite on random documents, what becomes of documents, resuming, and bad inputs."""

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("tokenizers")

from mplug_indexed import Indexed
from mplug_indexed.files import Writer, idx_path
from mplug_indexed.samples import IndexedLoader
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mplug import UsageError
from mplug_testing import DataSuite
from mplug_tokenization import describe_tokenizer, keep_tokenizer

S = 16
EOD = 0
IGNORED = -100
FOLDER = Path(mkdtemp(prefix="mplug-indexed-"))


@pytest.fixture(scope="module", autouse=True)
def _no_files_left() -> Iterator[None]:
    yield
    shutil.rmtree(FOLDER)


def write(prefix: Path, documents: list[Any], dtype: Any = np.uint16) -> Path:
    with Writer(prefix, dtype) as writer:
        writer.add_documents(np.concatenate([*map(np.array, documents), []]), [len(one) for one in documents])
    return prefix


def random_documents(seed: int, number: int = 300, longest: int = 25, vocab_size: int = 250) -> list[Any]:
    """Documents of random tokens, each ended by EOD; but for the empty ones."""
    random = np.random.default_rng(seed)
    return [
        np.append(random.integers(1, vocab_size, length), EOD) if length else np.array([], dtype=np.int64)
        for length in random.integers(0, longest, number)
    ]


ENDS = {"data.eod_token": EOD}
FIM_TOKENS = {"fim_prefix_token": 251, "fim_middle_token": 252, "fim_suffix_token": 253}
FIM = {**ENDS, "data.vocab_size": 256, **{f"data.{name}": token for name, token in FIM_TOKENS.items()}}
ONE, TWO = (str(write(FOLDER / f"corpus{seed}", random_documents(seed))) for seed in (1, 2))


@pytest.mark.wide("data", tests=["test_its_fingerprint_is_that_of_its_samples"])
class TestEpochByEpoch(DataSuite):
    plugin = "indexed"
    settings = {"data.path": [ONE, TWO], "data.split": "9,1", "data.samples": "epoch"}
    other_data = {"data.path": ONE}
    examples = {"split": ["8,2"], "max_documents": [1]}
    beside = {
        "samples": {"data.path": ONE},
        "eod_token": {**ENDS, "data.eod_mask_loss": True},
        "eod_mask_loss": ENDS,
        "reset_positions": ENDS,
        "reset_attention": ENDS,
        "max_documents": {**ENDS, "data.reset_attention": True},
        **{field: {**FIM, "data.fim_rate": 0.9} for field in ("fim_rate", "fim_spm_rate", *FIM_TOKENS)},
    }
    without_effect = {"cache": "it says where the order is kept, and changes no sample (test_cache.py reads the files)"}


@pytest.mark.wide("data", tests=["test_its_fingerprint_is_that_of_its_samples"])
class TestRearrangedDocumentsOfABlend(DataSuite):
    plugin = "indexed"
    checks_fields = False
    other_data = {"data.path": {ONE: 1, TWO: 1}}
    settings = {
        **FIM,
        "data.fim_rate": 0.5,
        "data.path": {ONE: 0.3, TWO: 7},
        "data.split": "8,2",
        "data.eod_mask_loss": True,
        "data.reset_positions": True,
        "data.reset_attention": True,
    }


def build(config: dict[str, Any], split: str = "train", shard: tuple[int, int] = (0, 1), **trainer: Any) -> Any:
    section = {"seq_length": S, "seed": 1, "steps": 20, "global_batch_size": 8, "eval_samples": 8, "eval_every": 0}
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            trainer=SimpleNamespace(**{**section, **trainer}), model=SimpleNamespace(vocab_size=256)
        ),
        mesh=SimpleNamespace(batch_shard=lambda _: shard),
        rank=0,
        micro_batch_size=3,
    )
    plugin = Indexed(Indexed.Config(**config))
    if split == "train":
        plugin.configure(run.config)
        plugin.check_data(run.config)
    return plugin.build_loader(run, split)  # type: ignore[arg-type]


def taken(loader: IndexedLoader, number: int) -> dict[str, Any]:
    batches = list(loader.take(number))
    whole = [
        {name: one if one.dim() == 1 else one.expand(len(batch["sample_ids"]), -1) for name, one in batch.items()}
        for batch in batches
    ]
    return {name: torch.cat([batch[name] for batch in whole]) for name in whole[0]}


PADDED = [1, 2, 9, 9, 3] * 7


@pytest.mark.parametrize(
    ("document", "config", "tokens", "labels"),
    [
        (  # The last tokens are padded, and padding has no target.
            [*range(1, 30)],
            {"split": "0,1", "drop_last": False},
            [[*range(1, 17)], [*range(17, 30), 0, 0, 0]],
            [[*range(2, 18)], [*range(18, 30)] + [IGNORED] * 4],
        ),
        (  # Without the extra token, the last position has no target.
            [*range(1, 33)],
            {"extra_token": False},
            [[*range(1, 17)], [*range(17, 33)]],
            [[*range(2, 17), IGNORED], [*range(18, 33), IGNORED]],
        ),
        (  # A padding token is never a target, and is read as token 0.
            PADDED[: S + 1],
            {"samples": 1, "pad_token": 9},
            [([1, 2, 0, 0, 3] * 7)[:S]],
            [([2, IGNORED, IGNORED, 3, 1] * 7)[:S]],
        ),
    ],
)
def test_tokens_and_targets_are_those_of_the_document(
    tmp_path: Path, document: list[int], config: dict[str, Any], tokens: list[Any], labels: list[Any]
) -> None:
    section = {"path": str(write(tmp_path / "short", [document])), "split": "1", **config}
    split = "validation" if section["split"] == "0,1" else "train"
    batch = taken(build(section, split, eval_samples=1), len(tokens))
    assert sorted(batch["tokens"].tolist()) == sorted(tokens)
    assert sorted(batch["labels"].tolist()) == sorted(labels)


# Documents in a sample.


def test_positions_attention_and_loss_do_not_cross_documents() -> None:
    path = str(write(FOLDER / "three", [[1, 2, 3, EOD, 4, EOD, EOD, *range(5, 15), EOD]]))
    config = {"path": path, "split": "1", "samples": 1, "eod_token": EOD}
    everything = {"eod_mask_loss": True, "reset_positions": True, "reset_attention": True, "max_documents": 6}
    batch = taken(build({**config, **everything}), 1)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 4, 0, 0, *range(5, 14)]]
    assert batch["labels"].tolist() == [[2, 3, 0, IGNORED, 0, IGNORED, IGNORED, *range(6, 15)]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 0, *range(9)]]
    assert batch["document_lengths"].tolist() == [[4, 2, 1, 9, 0, 0]]
    plain = taken(build(config), 1)
    assert plain["labels"].tolist() == [[2, 3, 0, 4, 0, 0, *range(5, 15)]]
    assert plain["positions"].tolist() == [[*range(S)]]
    assert "document_lengths" not in plain


# Fill in the middle.

PRE, MID, SUF = FIM_TOKENS.values()
REARRANGED = {**FIM_TOKENS, "eod_token": EOD}


def documents_of(row: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in row:
        if token == EOD:
            found.append([])
        else:
            found[-1].append(token)
    return found


def put_together(document: list[int]) -> tuple[list[int], bool]:
    """(prefix, middle and suffix in the text's order, whether the suffix came first) of a rearranged document."""
    assert document[0] == PRE
    suffix, middle = document.index(SUF), document.index(MID)
    if suffix > 1 or middle < suffix:
        return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle], False
    return document[middle + 1 :] + document[2:middle], True


def windows(loader: IndexedLoader, number: int) -> list[list[int]]:
    batch = taken(loader, number)
    return torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1).tolist()


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_rearranged_documents_hold_the_text_but_for_three_tokens(spm_rate: float) -> None:
    config = {"path": ONE, "split": "1"}
    plain = windows(build(config, seq_length=40), 60)
    found = windows(build({**config, **REARRANGED, "fim_rate": 1.0, "fim_spm_rate": spm_rate}, seq_length=40), 60)
    rearranged = 0
    for before, after in zip(plain, found, strict=True):
        for old, new in zip(documents_of(before), documents_of(after), strict=True):
            if PRE not in new:
                assert new == old
                continue
            text, suffix_first = put_together(new)
            assert text == old[:-3]
            assert suffix_first or spm_rate == 0 or new.index(SUF) == 1
            rearranged += 1
    assert rearranged > 60


def test_a_rate_is_the_share_of_rearranged_documents() -> None:
    path = str(write(FOLDER / "long", [np.full(200, 7)] * 300))
    config = {"path": path, "split": "1", "samples": "epoch", **REARRANGED}
    rows = windows(build({**config, "fim_rate": 0.3, "fim_spm_rate": 0.25}, seq_length=100), 590)
    found = [row for row in rows if PRE in row]
    assert 0.24 < len(found) / len(rows) < 0.36
    assert 0.15 < sum(row[1] == SUF for row in found) / len(found) < 0.36


# One order: the suite reads it under other layouts, and tests/test_resume_of_loaders.py resumes it anywhere.


def test_a_longer_run_continues_the_order_of_the_shorter_one_or_is_refused() -> None:
    config = {"path": ONE, "split": "1"}
    short = build(config, steps=10)  # within an epoch, whose order does not depend on the run's length
    list(short.take(16))
    longer = build(config, steps=20)
    longer.load_state_dict(short.state_dict())
    assert windows(longer, 8) == windows(short, 8)
    much_longer = build(config, steps=200)
    with pytest.raises(UsageError, match=r"drawn for 80 samples, .* for 1600 samples; set data\.samples=80 to"):
        much_longer.load_state_dict(short.state_dict())
    kept = build({**config, "samples": 80}, steps=200)
    kept.load_state_dict(short.state_dict())
    assert windows(kept, 8) == windows(short, 8)


def test_a_mix_takes_data_sets_in_proportion_to_their_sizes() -> None:
    config = {"path": [ONE, TWO], "split": "1", "samples": "epoch"}
    alone = [build({**config, "path": path}) for path in (ONE, TWO)]
    rows = [tuple(row) for loader in alone for row in windows(loader, loader.samples_per_epoch)]
    loader = build(config)
    assert loader.samples_per_epoch == len(rows)
    assert sorted(map(tuple, windows(loader, len(rows)))) == sorted(rows)


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


def test_the_tokenizer_next_to_the_data_decides_which_token_ends_documents(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    prefix = write(tmp_path / "corpus", [np.append(random.integers(10, 250, 30), 3) for _ in range(50)])
    vocabulary = {"[UNK]": 0, "<PRE>": 4, "<MID>": 5, "<SUF>": 6, "</s>": 3}
    made = Tokenizer(WordLevel({**vocabulary, **{f"w{n}": n for n in range(10, 250)}}, unk_token="[UNK]"))
    made.add_special_tokens([*vocabulary])
    made.save(str(tmp_path / "tokenizer.json"))
    record = keep_tokenizer(describe_tokenizer("huggingface", {"path": str(tmp_path / "tokenizer.json")}), prefix)
    texts = {f"fim_{part}_token": f"<{part[:3].upper()}>" for part in ("prefix", "middle", "suffix")}
    numbers = {f"fim_{part}_token": number for part, number in (("prefix", 4), ("middle", 5), ("suffix", 6))}
    section = {"path": str(prefix), "split": "1", "fim_rate": 1.0, "reset_attention": True}
    assert record.eod == 3
    named, numbered = build({**section, **texts}), build({**section, **numbers, "eod_token": 3})
    for one, other in zip(named.take(8), numbered.take(8), strict=True):
        assert {4, 5, 6} <= set(one["tokens"].unique().tolist())
        for entry in ("tokens", "labels", "document_lengths"):
            assert torch.equal(one[entry], other[entry])
    with pytest.raises(UsageError, match=r"=<PER> is not a special token of the data's tokenizer \(it"):
        build({**section, **texts, "fim_prefix_token": "<PER>"})
    with pytest.raises(UsageError, match=r"fim_prefix_token=<PRE>: there is no tokenizer's record beside the data"):
        build({**section, **texts, "path": ONE, "eod_token": EOD})


def test_weights_may_be_written_as_yaml_reads_them() -> None:  # it takes 1e-3 for a text
    assert Indexed(Indexed.Config(path={"a": "1e-3", "b": 2})).weights == [0.001, 2.0]  # type: ignore[dict-item]


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
