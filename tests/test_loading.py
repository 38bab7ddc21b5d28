"""The loader of samples that can be read directly: one order whatever the ranks, and a state of one number."""

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mplug import MapLoader, MicroBatch


def loader(shard: tuple[int, int] = (0, 1), micro_batch_size: int = 2) -> MapLoader:
    def read(sample_ids: range) -> MicroBatch:
        return {"sample_ids": torch.tensor(list(sample_ids))}

    return MapLoader(read, vocab_size=7, shard=shard, micro_batch_size=micro_batch_size)


def ids(micro_batches: Iterator[MicroBatch]) -> list[list[int]]:
    return [batch["sample_ids"].tolist() for batch in micro_batches]


def flat(micro_batches: Iterator[MicroBatch]) -> list[int]:
    return [number for batch in ids(micro_batches) for number in batch]


def test_samples_come_in_order_and_in_micro_batches() -> None:
    found = loader(micro_batch_size=2)
    assert ids(found.take(4)) == [[0, 1], [2, 3]]
    assert ids(found.take(3)) == [[4, 5], [6]]
    assert found.vocab_size == 7


def test_each_rank_reads_its_part_of_every_batch() -> None:
    ranks = [loader((index, 4)) for index in range(4)]
    assert [ids(rank.take(8)) for rank in ranks] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert [ids(rank.take(16)) for rank in ranks] == [
        [[8, 9], [10, 11]],
        [[12, 13], [14, 15]],
        [[16, 17], [18, 19]],
        [[20, 21], [22, 23]],
    ]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 5))
def test_the_ranks_together_take_what_one_rank_takes_without_overlap(
    batches: list[int], count: int, micro_batch_size: int
) -> None:
    alone = loader()
    ranks = [loader((index, count), micro_batch_size) for index in range(count)]
    for batch in batches:
        parts = [flat(rank.take(batch)) for rank in ranks]
        assert [number for part in parts for number in part] == flat(alone.take(batch))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=4), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_a_loader_continues_where_its_state_was_taken_under_any_number_of_ranks(
    before: list[int], after: list[int], count: int
) -> None:
    first = loader()
    for batch in before:
        flat(first.take(batch))
    state = first.state_dict()
    expected = [flat(first.take(batch)) for batch in after]
    ranks = [loader((index, count)) for index in range(count)]
    for rank in ranks:
        flat(rank.take(3))
        rank.load_state_dict(state)
    assert [sorted(n for rank in ranks for n in flat(rank.take(batch))) for batch in after] == expected


def test_the_state_is_plain_data_and_counts_the_samples_of_all_ranks() -> None:
    found = loader((1, 4))
    flat(found.take(8))
    assert found.state_dict() == {"samples": 8}


def test_a_batch_that_is_taken_is_taken_even_by_a_rank_that_has_no_part_in_it() -> None:
    ranks = [loader((index, 4)) for index in range(4)]
    assert sorted(len(flat(rank.take(2))) for rank in ranks) == [0, 0, 1, 1]
    assert [flat(rank.take(4)) for rank in ranks] == [[2], [3], [4], [5]]


def test_taking_moves_the_state_before_the_first_micro_batch_is_read() -> None:
    found = loader()
    unread = found.take(4)
    assert found.state_dict() == {"samples": 4}
    assert ids(found.take(2)) == [[4, 5]]
    assert ids(unread) == [[0, 1], [2, 3]]
