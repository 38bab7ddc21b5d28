"""Indices: shuffles, splits and corner cases. test_megatron.py compares indices and blends with recorded ones."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from mplug_indexed.indices import Cut, Shuffle, build_blend, parse_split, samples_of, sequences_of
from mplug_indexed.kernels import swap_some

from mplug import UsageError


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
