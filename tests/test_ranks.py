"""Ranks and groupings are what a list of ranks says, without one."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mplug.layout.ranks import Grouping, Ranks


@st.composite
def groupings(draw: st.DrawFn) -> Grouping:
    """Axes of up to 4 ranks; each is fixed, whole, in blocks, or kept at some indices only."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    together: list[int | tuple[int, ...]] = []
    for size in sizes:
        blocks = [number for number in range(1, size + 1) if size % number == 0]
        some = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
        together.append(draw(st.sampled_from(blocks) | some))
    return Grouping(tuple(map(str, range(len(sizes)))), sizes, tuple(together))


def group(grouping: Grouping, rank: int) -> tuple[int, ...]:
    """The group of a rank, found by asking every rank."""
    places = list(product(*map(range, grouping.sizes)))
    named = list(zip(grouping.together, places[rank], strict=True))
    if any(not isinstance(together, int) and index not in together for together, index in named):
        return (rank,)

    def is_beside(place: tuple[int, ...]) -> bool:
        pairs = zip(named, place, strict=True)
        return all(
            index // together == other // together if isinstance(together, int) else other in together
            for (together, index), other in pairs
        )

    return tuple(other for other, place in enumerate(places) if is_beside(place))


@settings(max_examples=50)
@given(groupings())
def test_a_grouping_gives_each_rank_the_ranks_that_differ_along_its_axes_only(grouping: Grouping) -> None:
    world = range(int(np.prod(grouping.sizes)))
    expected = [group(grouping, rank) for rank in world]
    assert [tuple(grouping.of(rank)) for rank in world] == expected
    assert {tuple(ranks) for ranks in grouping.all() if len(ranks) > 1} == {one for one in expected if len(one) > 1}
    if grouping.size > 1:
        assert tuple(grouping.leader) == next(ranks for ranks in expected if len(ranks) == grouping.size)


@settings(max_examples=150)
@given(groupings(), st.data())
def test_ranks_are_in_ascending_order(grouping: Grouping, data: st.DataObject) -> None:
    world = range(int(np.prod(grouping.sizes)))
    ranks = grouping.of(data.draw(st.sampled_from(world)))
    found = list(ranks)
    assert [rank for rank in range(-2, len(world) + 2) if rank in ranks] == sorted(found) == found
    assert (len(ranks), ranks.first) == (len(found), min(found))
    assert [ranks[number] for number in range(-len(found), len(found))] == [*found, *found]
    assert ranks[1:] == tuple(found)[1:]
    with pytest.raises(IndexError):
        ranks[len(found)]


@settings(max_examples=50)
@given(groupings(), groupings(), st.data())
def test_equal_sets_of_ranks_are_equal_whatever_axes_name_them(a: Grouping, b: Grouping, data: st.DataObject) -> None:
    world = range(min(int(np.prod(a.sizes)), int(np.prod(b.sizes))))
    found = [grouping.of(data.draw(st.sampled_from(world))) for grouping in (a, b)]
    assert (found[0] == found[1]) == (tuple(found[0]) == tuple(found[1]))
    assert found[0] != found[1] or hash(found[0]) == hash(found[1])


def test_all_stages_by_number_and_a_whole_axis_are_the_same_ranks() -> None:
    named, whole = (Grouping(("pp", "tp"), (3, 2), (stages, 2)).of(4) for stages in ((0, 1, 2), 3))
    assert (named, hash(named)) == (whole, hash(whole))
    assert Ranks.of(1, [(0, 4)]) == Ranks.of(1, [range(0, 8, 4)])
    assert Grouping(("dp", "tp"), (2, 3), (2, 3)).of(4) == Grouping(("dp",), (6,), (6,)).of(4)


def test_without_an_axis_ranks_share_their_index_along_it() -> None:
    both = Grouping(("dp", "tp"), (2, 4), (2, 2))
    assert [*both.of(5)] == [0, 1, 4, 5]
    assert [*both.without(["tp"]).of(5)] == [1, 5]
    assert [*both.without(["dp"]).of(5)] == [4, 5]
    assert both.without(["dp", "tp"]).of(5) == Ranks(5)


def test_a_million_ranks_cost_no_more_than_eight() -> None:
    many = Grouping(("pp", "dp", "tp"), (16, 1 << 13, 8), ((0, 15), 1 << 13, 1))
    ranks = many.of(3)
    assert (len(ranks), ranks.first, ranks[-1]) == (1 << 14, 3, (1 << 20) - 5)
    assert ((1 << 20) - 5 in ranks, 1 << 19 in ranks, -1 in ranks, "3" in ranks) == (True, False, False, False)


def test_groups_of_some_indices_along_two_axes_are_those_found_by_hand() -> None:
    """Of 4 x 3 ranks, those with index 2 or 3 along the first axis and 1 or 2 along the second: 7, 8, 10 and 11."""
    grouping = Grouping(("slow", "fast"), (4, 3), ((2, 3), (1, 2)))
    assert tuple(grouping.leader) == (7, 8, 10, 11)
    assert [tuple(ranks) for ranks in grouping.all()] == [(7, 8, 10, 11)]
    assert [tuple(grouping.of(rank)) for rank in (7, 11, 0, 9)] == [(7, 8, 10, 11), (7, 8, 10, 11), (0,), (9,)]
    assert grouping.size == 4
