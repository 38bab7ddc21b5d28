"""The loader: the data suite on random documents, what becomes of documents, resuming, and bad inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("tokenizers")

from indexed_files import EOD, FIM_TOKENS, FOLDER, ONE, TWO, S, build, taken, windows, write
from mplug_indexed import Indexed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mplug import UsageError
from mplug_testing import DataSuite
from mplug_tokenization import describe_tokenizer, keep_tokenizer

IGNORED = -100
ENDS = {"data.eod_token": EOD}
FIM = {**ENDS, "data.vocab_size": 256, **{f"data.{name}": token for name, token in FIM_TOKENS.items()}}


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
