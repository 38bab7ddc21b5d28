"""Conversations packed into samples, their weights, blends of them, and epochs that are resumed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_energon.packing import Size, pack
from pair_runs import checkpoint_of, errors, failures, follow, worst
from picture_talks import IM_END, PACKED, START, TINY, VISION, asked, drawn, first, loader, pictured, sample, targets

from mplug import MicroBatch, UsageError
from mplug.training.assembly import build_loader
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity
from mplug_testing.resume import require_exact_resume

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")
from energon_numbers import colours_of, numbers


def test_a_picture_in_an_answer_and_behind_the_last_answer_is_no_target(made: Callable[..., Path]) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "this:"}, {"type": "image"}]}
    after = {"role": "user", "content": [{"type": "image"}]}
    record = {"messages": [{"role": "user", "content": "Show"}, answer, after]}
    batch = first(made(sample(record, drawn("red"), drawn("blue"))))
    assert targets(batch) == [*b"this:", IM_END]
    assert colours_of(batch) == ["red"]


# Packing.


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), max_size=40), st.integers(1, 5))
def test_no_sample_exceeds_a_budget_and_every_conversation_is_in_one(sizes: list[tuple[int, int]], most: int) -> None:
    bins = pack([Size(*size) for size in sizes], Size(20, 9), most)
    assert sorted(item for one in bins for item in one) == list(range(len(sizes)))
    for one in bins:
        assert 0 < len(one) <= most
        assert sum(sizes[item][0] for item in one) <= 20
        assert sum(sizes[item][1] for item in one) <= 9


def test_large_conversations_are_placed_first_and_leave_the_least_room() -> None:
    sizes = [Size(5, 0), Size(3, 0), Size(6, 0), Size(2, 0), Size(4, 0)]
    assert pack(sizes, Size(10, 1), 9) == [[0, 1, 3], [2, 4]]
    assert pack([Size(1, 3), Size(1, 3), Size(1, 2)], Size(10, 5), 9) == [[0, 2], [1]]


def documents(batch: MicroBatch) -> list[tuple[tuple[int, ...], ...]]:
    """(tokens, labels, positions, coordinates of rows) of each document with an answer."""
    found = []
    for row, lengths in enumerate(batch["document_lengths"].tolist()):
        ends = [length for length in lengths if length]
        columns = [batch[name][row].split(ends) for name in ("tokens", "labels", "positions", "coordinates")]
        for tokens, labels, positions, coordinates in zip(*columns, strict=True):
            assert positions.tolist() == list(range(len(positions)))
            if any(label >= 0 for label in labels.tolist()):
                entries = (tokens, labels, coordinates.flatten())
                found.append(tuple(tuple(entry.tolist()) for entry in entries))
    return found


def test_packed_conversations_are_those_that_have_a_sample_of_their_own(conversations: Path) -> None:
    whole = {"data.streams": 1, "data.shuffle_buffer_size": None, "data.max_samples_per_sequence": None}
    alone = list(loader(conversations, **whole).take(40))
    expected = set()
    for batch in alone:
        for row in range(len(batch["tokens"])):
            end = batch["tokens"][row].tolist().index(256)
            entries = (batch[name][row, :end] for name in ("tokens", "labels", "coordinates"))
            expected.add(tuple(tuple(entry.flatten().tolist()) for entry in entries))
    found, rows = list[Any](), list[int]()
    single = {"data.max_rows": 24, "trainer.micro_batch_size": 1}
    for batch in loader(conversations, **whole, **PACKED, **single).take(40):
        found += documents(batch)
        rows.append(int(batch["patch_lengths"].sum()))
    assert len(found) > 60  # of 40 samples
    assert set(found) == expected
    assert len(expected) == 40
    assert max(rows) == 24


def test_a_long_conversation_keeps_whole_pictures(made: Callable[..., Path]) -> None:
    """The picture that does not fit whole is not in the sample, nor what follows it."""
    begin = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = {"messages": [*begin, *asked([{"type": "text", "text": "c" * 5}, {"type": "image"}], "d" * 50)["messages"]]}
    path = made(sample(long, drawn("red", 32, 32)))
    batch = first(path, **{"trainer.seq_length": 50})  # the picture would begin at 34 and end at 52
    tokens = batch["tokens"][0].tolist()
    assert tokens[33:] == [*b"c", *[256] * 16]
    assert batch["vision_rows"].max() == -1
    assert targets(batch) == [*b"b", IM_END]
    with pytest.raises(UsageError, match=r"'k0\.json', 'k0\.0\.png': it has \d+ tokens and 64 rows"):
        first(path, **{"trainer.seq_length": 50, "data.too_long": "refuse"})
    assert START in first(path, **{"data.max_rows": 64})["tokens"][0].tolist()
    with pytest.raises(UsageError, match=r"a picture of 18 tokens and 64 rows is larger than a sample"):
        first(path, **{"data.max_rows": 63})


# Weights.

WEIGHTED = {"data.sample_weights": True}


def weighted(number: int) -> dict[str, bytes]:
    """The question of `pictured`, with a weight from 0 to 2."""
    files = pictured(number)
    return {**files, "json": json.dumps({**json.loads(files["json"]), "weight": number % 5 / 2}).encode()}


def test_the_weight_of_a_conversation_is_that_of_each_of_its_tokens(made: Callable[..., Path]) -> None:
    path = made(*map(weighted, range(8)))
    whole = {"data.shuffle_buffer_size": None, "data.max_samples_per_sequence": None, "data.max_documents": 4}
    own = {**PACKED, "data.packing_buffer_size": 8, **whole, **WEIGHTED}
    seen = dict[int, float]()
    for batch in loader(path, **own, **{"data.streams": 1}).take(6):
        for row, lengths in enumerate(batch["document_lengths"].tolist()):
            ends = [length for length in lengths if length]
            columns = (batch[name][row].split(ends) for name in ("tokens", "labels", "loss_weights"))
            for tokens, labels, weights in zip(*columns, strict=True):
                (weight,) = weights.unique().tolist()
                if any(label >= 0 for label in labels.tolist()):
                    text = bytes(token for token in tokens.tolist() if token < 256).decode()
                    seen[int(re.search(r"(\d+):", text)[1])] = weight  # type: ignore[index]
    assert seen == {number: number % 5 / 2 for number in range(8)}
    assert "loss_weights" not in first(made(pictured(1), folder="plain"))


LAYOUTS = pytest.mark.wide("layouts")


@pytest.mark.parametrize(
    "layout",
    ["cp2", *(pytest.param(layout, marks=LAYOUTS) for layout in ("dp2", "tp2", "pp2", "dp2 parallel.balance=true"))],
)
@pytest.mark.wide("data")
def test_a_layout_trains_packed_conversations_with_weights_as_one_process_does(
    prepare: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    parts = {part: [{f"{part}{n:02}": weighted(n) for n in range(24)}] for part in ("train", "val")}
    own = {**TINY, **PACKED, **WEIGHTED, "data.path": str(prepare(tmp_path / "set", parts, "CrudeWebdataset"))}
    require_parity({**own, "model.num_kv_heads": 2, "model.vision": {**VISION, "typical_patches": 16}}, layout)


# The order, and runs.


def blended(folder: Path, conversations: Path, made: Callable[..., Path]) -> Path:
    """A metadataset of three parts of conversations and one part of others, whose answers are 'green'."""
    other = made(*(sample(asked(f"{number}?<image>", "green"), drawn("green")) for number in range(8)))
    parts = [{"path": str(conversations), "weight": 3}, {"path": str(other), "weight": 1}]
    named = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend = folder / "blend.yaml"
    blend.write_text(yaml.safe_dump({**named, "splits": {"train": {"blend": parts}}}))
    return blend


def test_a_blend_of_conversations_follows_its_weights(
    tmp_path: Path, conversations: Path, made: Callable[..., Path]
) -> None:
    batches = list(loader(blended(tmp_path, conversations, made)).take(160))
    counts = [sum(len(numbers(batch, mark)) for batch in batches) for mark in (b":", rb"\?")]
    assert sum(counts) == 160
    assert 22 <= counts[1] <= 58  # a quarter, within more than three standard deviations


def test_an_epoch_that_is_resumed_on_two_ranks_has_every_conversation_once(conversations: Path) -> None:
    own = {"data.streams": 4, "trainer.micro_batch_size": 2, "data.shuffle_buffer_size": None}
    whole = loader(conversations, **own)
    seen = [number for batch in whole.take(16) for number in numbers(batch)]
    state = whole.state_dict()
    for rank in range(2):
        run = tiny_run({**TINY, **own, "data.path": str(conversations), "parallel.layout": "dp2"})
        run.device, run.rank = "cpu", rank
        again = build_loader(run, "train")
        again.load_state_dict(state)
        seen += [number for batch in again.take(24) for number in numbers(batch)]
    assert sorted(seen) == list(range(40))


@pytest.mark.wide("data")
def test_a_run_with_pictures_that_resumes_on_two_ranks_has_the_losses_of_one_process(
    conversations: Path, tmp_path: Path
) -> None:
    """Stopped behind the first of two steps of 16 samples; an epoch has 40."""
    changes = {**TINY, "data.path": str(conversations), "trainer.precision": "fp64", "trainer.global_batch_size": 16}
    own = {**changes, "data.streams": 4, "trainer.micro_batch_size": 4, "trainer.eval_samples": 8}
    own |= {"checkpoint.asynchronous": False, "schedule.warmup_steps": 0}
    expected = follow(own, tmp_path / "whole")
    source, layout = checkpoint_of(tmp_path / "whole"), {"parallel.layout": "dp2"}
    ranks = run_workers(2, follow, {**own, **layout}, tmp_path / "resumed", source, timeout=240)
    assert [sorted(rank.losses) for rank in ranks] == [[2], [2]]
    assert failures(worst(errors(ranks, expected))) == []


FEWER_AND_MORE = [
    ("dp4", "dp2"),
    *(pytest.param(*one, marks=pytest.mark.wide("data")) for one in (("dp2", ""), ("", "dp4"))),
]


@pytest.mark.parametrize(("before", "after"), FEWER_AND_MORE)
def test_packed_conversations_of_a_blend_resume_exactly_under_another_number_of_ranks(
    tmp_path: Path, conversations: Path, made: Callable[..., Path], before: str, after: str
) -> None:
    blend = blended(tmp_path, conversations, made)
    own = {**TINY, **PACKED, "data.path": str(blend), "data.streams": 4, "trainer.micro_batch_size": 2}
    require_exact_resume(own, before, [8, 4, 12], after, count=16)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.wide("data")
def test_worker_processes_resume_exactly(conversations: Path) -> None:
    own = {"data.path": str(conversations), "data.num_workers": 1, "trainer.micro_batch_size": 2}
    require_exact_resume({**TINY, **PACKED, **own}, "dp2", [8], "", count=8)
