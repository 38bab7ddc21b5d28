"""Pairs keep the contract of data; a sample is a pair, and wrong lines are refused with their place."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mplug import IGNORED, UsageError
from mplug_testing.harness import tiny_run


def pairs(number: int) -> str:
    lines = [{"input": f"say {n} again", "target": f"{n} {n}"} for n in range(number)]
    return "\n".join(map(json.dumps, lines))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text(pairs(300))
    return file


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    given = {"data.name": "pairs", "data.path": str(path), "data.encoder_length": 20, "model.name": "t5"}
    return {**given, "trainer.seq_length": 12, **{f"data.{name}": value for name, value in changes.items()}}


def loader(path: Path, split: str = "train", **changes: Any) -> Any:
    run = tiny_run(settings(path, **changes))
    run.hooks.call.check_data(config=run.config)
    return run.hooks.call.build_loader(run=run, split=split)


def test_a_sample_is_a_pair_with_ends_and_padding(path: Path) -> None:
    found = loader(path)
    batch = next(found.take(8))
    for row, target in enumerate(batch["labels"]):
        kept = target[target != IGNORED].tolist()
        text, end = bytes(kept[:-1]).decode(), kept[-1]
        number = text.split()[0]
        assert (text, end) == (f"{number} {number}", found_end())
        assert batch["tokens"][row].tolist() == [0, *kept[:-1], *[0] * (12 - len(kept))]
        rows = batch["encoder_rows"][row]
        assert bytes(batch["encoder_tokens"][0][rows[rows >= 0]][:-1].tolist()).decode() == f"say {number} again"


def found_end() -> int:
    from mplug_tokenization import describe_tokenizer, load_tokenizer

    end = load_tokenizer(describe_tokenizer("bytes", {}, "")).eod
    assert end is not None
    return end


def texts(loader: Any, number: int) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in loader.take(number) for row in batch["labels"]]


def test_an_epoch_has_every_pair_of_its_split_once_and_another_order(path: Path) -> None:
    train, validation = loader(path), loader(path, "validation")
    first, second = (texts(train, train.samples_per_epoch) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    held = texts(validation, validation.samples_per_epoch)
    assert len({*first, *held}) == len(first) + len(held) == 300
    assert 3 <= len(held) <= 40


def test_long_pairs_are_truncated_or_dropped(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(pairs(40) + '\n{"input": "' + "x" * 30 + '", "target": "long"}')
    kept, dropped = loader(file, validation_percent=0.01), loader(file, validation_percent=0.01, too_long="drop")
    assert (kept.samples_per_epoch, dropped.samples_per_epoch) == (41, 40)
    rows = [batch["encoder_rows"] for batch in kept.take(41)]
    assert torch.cat(rows).ge(0).sum(dim=1).max() == 20


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "a"}', r":2 has no text 'target'"),
        ('["a", "b"]', r":2 has no text 'input'"),
        ('{"input": 3, "target": "b"}', r":2 has no text 'input'"),
        ("{", r":2 is no JSON in UTF-8"),
        ('{"input": "\\ud800", "target": "b"}', r":2 is no JSON in UTF-8"),
    ],
)
def test_a_line_that_is_no_pair_is_refused_with_its_place(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"input": "a", "target": "b"}\n' + line)
    with pytest.raises(UsageError, match=said):
        loader(file)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    run = tiny_run(settings(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="names no file"):
        run.hooks.call.check_data(config=run.config)
