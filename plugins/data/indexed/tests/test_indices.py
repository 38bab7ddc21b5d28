"""Indices: nothing is lost or read twice, splits cut where they say, and the rules' corner cases."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from mplug_indexed.indices import (
    Cut,
    Epochs,
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


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 20),
    st.integers(1, 9),
    st.integers(0, 1),
    st.integers(1, 120),
)
def test_samples_cut_the_stream_of_documents_without_gap_or_overlap(
    lengths: list[int], seq_length: int, extra: int, samples: int
) -> None:
    array, sequences, cut = np.array(lengths, dtype=np.int32), range(len(lengths)), Cut(seq_length, extra)
    tokens = total(array, sequences)
    epochs = cut.epochs(tokens, samples)
    document, sample, shuffle = build_indices(array, sequences, cut, epochs, 7)
    assert sorted(document) == sorted([*sequences] * epochs.number)
    assert sorted(shuffle) == list(range(len(sample) - 1))
    assert len(shuffle) >= samples
    assert len(shuffle) == (epochs.number * tokens - extra) // seq_length
    starts = np.cumsum(array[document]) - array[document]
    assert (starts[sample[:, 0]] + sample[:, 1]).tolist() == [k * seq_length for k in range(len(sample))]
    assert (sample[:, 1] <= array[document][sample[:, 0]]).all()


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


@settings(max_examples=50)
@given(st.integers(2, 400), st.integers(1, 9), st.integers(0, 1), st.integers(1, 300))
def test_there_are_as_few_epochs_as_the_samples_need(tokens: int, seq_length: int, extra: int, samples: int) -> None:
    number = Cut(seq_length, extra).epochs(tokens, samples).number
    needed = samples * seq_length + extra
    assert number * tokens >= needed
    assert number == 1 or (number - 1) * tokens < needed


def test_a_last_epoch_that_is_used_to_less_than_four_fifths_is_shuffled_alone() -> None:
    """A hundred documents of ten tokens, samples of ten: 100 a first epoch without the extra token."""
    lengths, cut = np.full(100, 10, dtype=np.int32), Cut(10, 0)
    assert cut.epochs(1000, 179) == Epochs(2, 100)
    assert cut.epochs(1000, 180) == Epochs(2, None)
    assert cut.epochs(1000, 100) == Epochs(1, None)
    _, _, shuffle = build_indices(lengths, range(100), cut, Epochs(2, 100), 1)
    assert sorted(shuffle[:100]) == list(range(100))
    _, _, together = build_indices(lengths, range(100), cut, Epochs(2, None), 1)
    assert sorted(together[:100]) != list(range(100))


def test_keep_rest_makes_a_sample_of_the_rest_of_a_stream() -> None:
    assert (Cut(10, 1).samples(95), Cut(10, 1, keep_rest=True).samples(95)) == (9, 10)
    assert (Cut(10, 1).samples(91), Cut(10, 1, keep_rest=True).samples(91)) == (9, 9)
    assert Cut(10, 1, keep_rest=True).samples(170_000_002) == 17_000_000  # fp32: 17,000,001 would be exact


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


@settings(max_examples=50)
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=12), st.integers(1, 500))
def test_every_prefix_of_a_blend_follows_the_weights(weights: list[float], size: int) -> None:
    """No data set is ever more than one sample per other data set away from its share."""
    shares = np.array(normalize(weights))
    blend, taken = build_blend(shares.tolist(), size)
    assert sum(taken) == size
    counts = np.cumsum(blend.which[:, None] == np.arange(len(weights)), axis=0)
    lag = shares * np.arange(1, size + 1)[:, None] - counts
    assert np.abs(lag).max() < len(weights)
    for n in range(len(weights)):
        assert blend.sample[blend.which == n].tolist() == list(range(taken[n]))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_mix_by_size_has_every_sample_once(sizes: list[int]) -> None:
    blend, taken = build_blend(normalize(sizes), sum(sizes), sizes)
    assert taken == sizes
    pairs = set(zip(blend.which.tolist(), blend.sample.tolist(), strict=True))
    assert pairs == {(n, sample) for n, size in enumerate(sizes) for sample in range(size)}


def test_a_blend_asks_for_a_little_more_than_it_needs() -> None:
    assert samples_of(1000, [0.3, 0.7]) == [300, 700]
    assert samples_of(1000, [0.3, 0.7], 0.005) == [302, 704]


def test_a_blend_of_too_many_data_sets_is_refused() -> None:
    with pytest.raises(UsageError, match="40000 data sets, and a blend has at most 32767"):
        build_blend([1 / 40_000] * 40_000, 1)
