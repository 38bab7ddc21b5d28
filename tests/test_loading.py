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
    assert [ids(rank.take(16)) for rank in ranks[:2]] == [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]


SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@settings(max_examples=80)
@given(SIZES, SIZES, st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_ranks_take_together_what_one_takes_and_others_continue_from_their_state(
    before: list[int], after: list[int], count: int, others: int, micro_batch_size: int
) -> None:
    alone = loader()
    ranks = [loader((index, count), micro_batch_size) for index in range(count)]
    for batch in before:
        parts = [flat(rank.take(batch)) for rank in ranks]
        assert [number for part in parts for number in part] == flat(alone.take(batch))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    state = ranks[-1].state_dict()
    assert state == {"samples": sum(before)}, "plain data, which counts the samples of all ranks"
    ranks = [loader((index, others)) for index in range(others)]
    for rank in ranks:
        flat(rank.take(3))
        rank.load_state_dict(state)
    for batch in after:
        assert sorted(n for rank in ranks for n in flat(rank.take(batch))) == flat(alone.take(batch))


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
