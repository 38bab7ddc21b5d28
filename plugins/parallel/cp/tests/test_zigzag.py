"""Who holds what of a sequence, and which part of attention sees what: every pair exactly once. As data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mplug_cp.blocks import Block, Sight, blocks_of_all, own_block, ring_blocks, steps_of
from mplug_cp.documents import lengths_in, places_in
from mplug_cp.exchange import copies_of_kv
from mplug_cp.gathered import by_rank, in_order
from mplug_cp.zigzag import chunks_held, held_at, zigzag

from mplug import UsageError
from mplug_nn.parts import numbered, positions_in
from mplug_nn.specification import unseen_by_position

SIZES, CHUNKS = st.integers(2, 6), st.integers(1, 5)


def held(length: int, size: int, index: int) -> list[int]:
    return [position for part in zigzag(length, size, index) for position in part]


@given(SIZES, CHUNKS)
def test_every_position_is_held_once_in_the_order_of_the_sequence(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    parts = [held(length, size, index) for index in range(size)]
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert all(part == sorted(part) and len(part) == 2 * chunk for part in parts)


@given(SIZES, CHUNKS)
def test_a_causal_mask_leaves_every_rank_the_same_work(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    pairs = {sum(position + 1 for position in held(length, size, index)) for index in range(size)}
    assert len(pairs) == 1


@given(SIZES)
def test_the_places_of_chunks_and_the_chunks_at_places_are_each_others_inverse(size: int) -> None:
    assert [chunks_held(size)[place] for place in held_at(size)] == list(range(2 * size))
    assert chunks_held(size) == [part.start for rank in range(size) for part in zigzag(2 * size, size, rank)]


@given(SIZES, CHUNKS)
def test_gathered_keys_come_in_the_order_of_the_sequence_and_return_to_their_ranks(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    gathered = torch.tensor([held(length, size, rank) for rank in range(size)])  # [R, S]
    gathered = torch.stack((gathered, gathered + length), dim=1)[:, :, None, :, None, None]  # [R, 2, B, S, G, K]
    whole = in_order(gathered)
    assert whole.flatten().tolist() == list(range(2 * length))
    assert torch.equal(by_rank(whole, size), gathered)


@given(st.integers(1, 6), st.integers(1, 40))
def test_what_does_not_divide_is_refused_with_the_numbers(size: int, length: int) -> None:
    if size == 1 or length % (2 * size) == 0:
        assert sum(len(held(length, size, index)) for index in range(size)) == length
        return
    with pytest.raises(
        UsageError, match=f"{2 * size} chunks, two per rank, and {2 * size} does not divide its length {length}"
    ):
        zigzag(length, size, 0)


# Parts. S the length of the whole sequence.

SIGHTS = st.builds(Sight, st.booleans(), st.none() | st.integers(1, 70)) | st.builds(
    Sight, st.just(True), st.none() | st.integers(1, 70), st.just(True)
)


def ring(size: int, index: int, length: int, sight: Sight) -> list[tuple[Block, list[int]]]:
    """Every part of a rank, with the positions of the keys that are at hand."""
    keys = {step: held(size * length, size, (index - step) % size) for step in steps_of(size, length, sight)}
    return [(block, keys[step]) for step in keys for block in ring_blocks(step, index, size, length, sight)]


def gathered(size: int, index: int, length: int, sight: Sight) -> list[tuple[Block, list[int]]]:
    own = [(own_block(index, size, length, sight), held(size * length, size, index))] if sight.own_first else []
    everything = list(range(size * length))
    return [*own, *((block, everything) for block in blocks_of_all(index, size, length, sight))]


def numbered_groups(borders: set[int], whole: int) -> torch.Tensor:
    """Groups [1, S] between borders: every other stretch is a group, and the others are in none."""
    stretch = torch.bucketize(torch.arange(whole), torch.tensor(sorted(borders)), right=True)
    return torch.where(stretch % 2 == 1, stretch, -1)[None]


@pytest.mark.wide("layouts", quick=["gathered"])
@pytest.mark.parametrize("parts", [ring, gathered])
@given(data=st.data(), size=SIZES, chunk=CHUNKS, sight=SIGHTS)
def test_every_query_sees_every_key_that_it_may_see_once(  # type: ignore[no-untyped-def]
    parts, data: st.DataObject, size: int, chunk: int, sight: Sight
) -> None:
    length = 2 * chunk
    whole = size * length
    borders = data.draw(st.sets(st.integers(1, whole - 1), max_size=5)) if sight.grouped else set()
    groups = numbered_groups(borders, whole) if sight.grouped else None
    seen = torch.zeros(whole, whole, dtype=torch.int64)
    for index in range(size):
        queries = held(whole, size, index)
        for number, (block, keys) in enumerate(parts(size, index, length, sight)):
            own, others = queries[block.queries], keys[block.keys]
            assert number > 0 or len(own) == length, "the first part has all queries"
            assert own == [p for part in block.of_queries for p in part]
            assert others == [p for part in block.of_keys for p in part]
            pairs = torch.ones(len(own), len(others), dtype=torch.int64)
            places = places_in(groups, block, sight)
            if places is None:
                pairs = pairs.tril() if block.causal else pairs
            else:
                distances = torch.tensor(others) - torch.tensor(own)[:, None]
                together = places.together()
                together = None if together is None else together[0, 0]
                for mask in unseen_by_position(distances, block.causal, places.window, together):
                    pairs = pairs.masked_fill(mask, 0)
                assert number == 0 or sight.grouped or bool(pairs.any()), "no part is empty"
            seen[torch.tensor(own)[:, None], torch.tensor(others)] += pairs
    at = positions_in((range(whole),), seen.device)
    expected = torch.ones_like(seen)
    same = None if groups is None else ((groups == groups.T) & (groups >= 0))
    for mask in unseen_by_position(at - at[:, None], sight.causal, sight.window, same):
        expected = expected.masked_fill(mask, 0)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(("window", "steps"), [(None, [0, 1, 2, 3]), (5, [0, 1, 3]), (1, [0])])
def test_a_ring_leaves_out_the_steps_at_which_windows_see_nothing(window: int | None, steps: list[int]) -> None:
    """Chunks of 8: a window of up to 9 reaches the chunk before, which a neighbour in the ring has."""
    assert list(steps_of(4, 16, Sight(True, window))) == steps


@pytest.mark.wide("layouts")
@given(st.data(), SIZES, CHUNKS, SIGHTS)
def test_of_a_part_each_document_has_the_queries_and_the_keys_that_are_its_own(
    data: st.DataObject, size: int, chunk: int, sight: Sight
) -> None:
    length = 2 * chunk
    whole = size * length
    borders = data.draw(st.sets(st.integers(1, whole - 1), max_size=5))
    ends = [*sorted(borders), whole]
    lengths = torch.tensor([[end - begin for begin, end in zip([0, *ends], ends, strict=False)]])
    document = numbered(lengths, whole)[0]  # [S]
    for index in range(size):
        for block, keys in ring(size, index, length, sight) + gathered(size, index, length, sight):
            found = lengths_in(lengths, block)
            assert found is not None
            for got, positions in zip(found, (held(whole, size, index)[block.queries], keys[block.keys]), strict=True):
                assert torch.equal(numbered(got, len(positions))[0], document[positions])


# Heads.


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_copies_of_kv_heads_go_to_the_ranks_of_their_query_heads(groups: int, sharers: int, factor: int) -> None:
    heads = groups * sharers
    for size in (number for number in range(1, heads + 1) if heads % number == 0):
        copies = copies_of_kv(heads, groups, size)
        copied = [group for group in range(groups) for _ in range(copies)]
        assert len(copied) % size == 0
        for rank in range(size):
            own = copied[rank * len(copied) // size : (rank + 1) * len(copied) // size]
            queries = range(rank * heads // size, (rank + 1) * heads // size)
            assert len(queries) % len(own) == 0
            shared = len(queries) // len(own)
            assert [own[n // shared] for n in range(len(queries))] == [query // sharers for query in queries]
