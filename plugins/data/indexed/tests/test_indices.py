"""Indices, samples, files and blends are those of Megatron Core; shuffles are numpy's; splits cut where they say.

`benchmarks/megatron_data.py compare --record` has recorded the results of Megatron Core.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import script

pytest.importorskip("numba")

from mplug_indexed.files import Reader, Writer, bin_path, idx_path
from mplug_indexed.indices import (
    Cut,
    Shuffle,
    build_blend,
    build_indices,
    normalize,
    parse_split,
    samples_of,
    sequences_of,
    total,
)
from mplug_indexed.kernels import swap_some

from mplug import UsageError

RECORDED = json.loads(Path(__file__).with_name("megatron.json").read_text())


BENCHMARK = script("benchmarks/megatron_data.py")
"""It has made the record: how its cases are made is written there only."""


EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.wide("data"))], ids=["some", "all"])


def test_the_recorded_cases_cover_every_rule() -> None:
    cases = RECORDED["indices"]
    assert len(cases) == 1000
    assert sum(case["before_last"] is not None for case in cases) > 100
    for name, values in {"extra": {0, 1}, "keep_rest": {False, True}, "seq_length": {1, 2, 7, 16, 64}}.items():
        assert {case[name] for case in cases} == values


@EVERY
def test_the_three_indices_of_a_thousand_cases_are_those_of_megatron(every: int) -> None:
    for case in RECORDED["indices"][::every]:
        lengths = BENCHMARK.lengths_of(case)
        sequences = range(case["first"], len(lengths))
        cut = Cut(case["seq_length"], case["extra"], case["keep_rest"])
        epochs = cut.epochs(total(lengths, sequences), case["samples"])
        found = build_indices(lengths, sequences, cut, epochs, case["seed"])
        assert BENCHMARK.hashed(*found) == case["indices"], case


@EVERY
def test_samples_are_those_of_megatron(tmp_path: Path, every: int) -> None:
    """Tokens, labels with every mask, and positions that begin anew with each document."""
    cases = [case for case in RECORDED["indices"] if "read" in case]
    assert len(cases) > 30
    for case in cases[:: min(every, 3)]:
        prefix = BENCHMARK.write_case(tmp_path / str(case["seed"]), case)
        loader = BENCHMARK.our_loader(prefix, case, case["samples"], tmp_path / "cache")
        assert BENCHMARK.hashed(*BENCHMARK.our_samples(loader)) == case["read"], case


@pytest.mark.parametrize("case", RECORDED["files"], ids=lambda case: case["dtype"])
def test_files_are_those_of_megatron_byte_for_byte(tmp_path: Path, case: dict[str, Any]) -> None:
    lengths = BENCHMARK.lengths_of({**BENCHMARK.draw_case(case["seed"]), "documents": 60, "longest": 30, "empty": 0.3})
    tokens = np.random.default_rng(case["seed"]).integers(0, 100, lengths.sum()).astype(case["dtype"])
    with Writer(tmp_path / "c", case["dtype"]) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(document, [len(document) // 3, len(document) - len(document) // 3])
    files = [np.frombuffer(path(tmp_path / "c").read_bytes(), dtype=np.uint8) for path in (bin_path, idx_path)]
    assert BENCHMARK.hashed(*files) == case["files"]
    Reader(tmp_path / "c").verify()


def test_blends_are_those_of_megatron() -> None:
    for case in RECORDED["blends"]:
        weights, capacities = case["weights"], case["weights"] if case["exhaustive"] else None
        once = normalize(weights)
        found, given = build_blend(once if case["exhaustive"] else normalize(once), case["size"], capacities)
        assert BENCHMARK.hashed(*found) == case["blend"], case
        assert given == np.bincount(found.which, minlength=len(weights)).tolist()


# Corner cases.


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9000) | st.sampled_from([65536, 65537]), max_size=6))
def test_shuffles_are_those_of_numpy(seed: int, sizes: list[int]) -> None:
    ours, numpys = Shuffle(seed), np.random.RandomState(seed)
    ours.DRAWS = 5001  # an odd number, and most shuffles need more
    for size in sizes:
        shuffled, expected = np.arange(size, dtype=np.uint32), np.arange(size, dtype=np.uint32)
        ours(shuffled)
        numpys.shuffle(expected)
        np.testing.assert_array_equal(shuffled, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that nobody touches costs nothing there")
def test_more_than_four_billion_entries_take_two_draws_each() -> None:
    size, marked = 2**32 + 300, 200
    order = np.zeros(size, dtype=np.uint8)
    order[-marked:] = np.arange(marked)[::-1]
    generator, numpys = Shuffle(5).generator, np.random.RandomState(5)
    left, used = swap_some(order, size, generator.random_raw(401))
    assert used == 400
    places = [numpys.randint(0, last + 1, dtype=np.int64) for last in range(size - 1, left - 1, -1)]
    assert 80 < len(places) < 140, "some half of the draws are above the entry"
    for k, place in enumerate(places):
        assert order[place] == k


def test_the_number_of_samples_is_computed_in_fp32() -> None:
    assert (Cut(10, 1).samples(91), Cut(10, 1, keep_rest=True).samples(91)) == (9, 9)
    assert Cut(10, 1, keep_rest=True).samples(170_000_002) == 17_000_000  # 17,000,001 would be exact


def test_splits_divide_the_sequences_by_weights() -> None:
    assert parse_split("969,30,1") == [(0.0, 0.969), (0.969, 0.969 + 0.03), (0.969 + 0.03, 0.969 + 0.03 + 0.001)]
    assert parse_split("1") == [(0.0, 1.0), None, None]
    assert parse_split("0,1") == [None, (0.0, 1.0), None]
    cuts = [sequences_of(part, 1001) for part in parse_split("8,1,1") if part]
    assert [number for cut in cuts for number in cut] == list(range(1001))
    assert [len(cut) for cut in cuts] == [801, 100, 100]


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1", "1,1,1,1", "nan", "inf,1"])
def test_a_split_without_valid_weights_is_refused(split: str) -> None:
    with pytest.raises(UsageError, match=r"data\.split '.*' is not a list of one to three shares"):
        parse_split(split)


def test_a_blend_asks_for_a_little_more_than_it_needs() -> None:
    assert samples_of(1000, [0.3, 0.7]) == [300, 700]
    assert samples_of(1000, [0.3, 0.7], 0.005) == [302, 704]


def test_a_blend_of_too_many_data_sets_is_refused() -> None:
    with pytest.raises(UsageError, match="40000 data sets, and a blend has at most 32767"):
        build_blend([1 / 40_000] * 40_000, 1)
