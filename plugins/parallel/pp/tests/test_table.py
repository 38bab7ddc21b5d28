"""Tables of actions: the checker proves the good ones and names the fault of the others."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mplug_pp.limited import zb_limited
from mplug_pp.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from mplug_pp.v_shaped import dualpipe_v, zb_v

from mplug_schedules import COMPUTE, Action, Kind, Row, Shape, Table, check, with_transfers

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
SF, RF, SB, RB = Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD
FURTHER = {SF: 1, RF: -1, SB: -1, RB: 1}
"""By kind of transfer: the other chunk's number minus the own one."""

SCHEDULES: dict[str, Callable[[Shape], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-limited": zb_limited,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
CHUNKS = {"interleaved": (2, 3, 4), "zb-h1": (1, 2, 3)}
"""The numbers of chunks per rank to try; otherwise the schedule's default."""


def row(text: str, rank: int, ranks: tuple[int, ...]) -> Row:
    """'F0 SF0' as actions of the chunk `rank`, 'F0.3' as one of chunk 3; peers follow from the chunks' ranks."""
    actions = []
    for word in text.split():
        found = re.fullmatch(r"([A-Z]+)([0-9]+)(?:\.([0-9]+))?", word)
        assert found
        kind, number, chunk = Kind(found[1]), int(found[2]), int(found[3] or rank)
        other = chunk + FURTHER.get(kind, 0)
        peer = None if kind in COMPUTE else ranks[other] if other in range(len(ranks)) else rank + FURTHER[kind]
        actions.append(Action(kind, number, chunk, peer))
    return tuple(actions)


def table(*rows: str, ranks: tuple[int, ...] | None = None) -> Table:
    ranks = ranks or tuple(range(len(rows)))
    return Table(tuple(row(text, rank, ranks) for rank, text in enumerate(rows)), ranks)


def computations(actions: Row) -> Row:
    return tuple(action for action in actions if action.kind in COMPUTE)


# What is proven.


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_schedule_is_proven_for_any_number_of_micro_batches(name: str, num_ranks: int) -> None:
    for number in (1, 2, 3, 5, 8, 13, 14):
        for chunks in CHUNKS.get(name, (None,)):
            shape = Shape(num_ranks, number, chunks)
            check(SCHEDULES[name](shape), shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_peaks_are_those_of_the_papers(num_ranks: int) -> None:
    """GPipe: m. 1F1B: p - r. ZB-H1 and ZB-V: p (2401.10241). DualPipeV: p + 1/2. Interleaved: 2104.04473, 2.2."""
    for number in (2 * num_ranks, 5 * num_ranks):
        shape = Shape(num_ranks, number)
        peaks = {name: check(schedule(shape), shape) for name, schedule in SCHEDULES.items()}
        assert peaks["gpipe"] == [number] * num_ranks
        assert peaks["1f1b"] == [num_ranks - rank for rank in range(num_ranks)]
        assert peaks["zb-h1"] == peaks["zb-v"] == [num_ranks] * num_ranks
        assert max(peaks["dualpipe-v"]) == num_ranks + 0.5
        assert max(peaks["interleaved"]) == min(number, (num_ranks + 2 * (num_ranks - 1) + 1) / 2)


@pytest.mark.parametrize("m", [3, 5])
def test_dualpipe_v_has_the_order_of_twice_as_many_micro_batches_as_ranks_if_it_has_fewer(m: int) -> None:
    for few, whole in zip(dualpipe_v(Shape(3, m)).rows, dualpipe_v(Shape(3, 6)).rows, strict=True):
        assert computations(few) == tuple(action for action in computations(whole) if action.micro_batch < m)


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limited_schedule_stays_within_its_limit_and_uses_it(limit: int) -> None:
    for num_ranks in (2, 3, 4):
        shape = Shape(num_ranks, 16, limit=limit)
        assert max(check(zb_limited(shape), shape)) == limit


def test_interleaved_groups_may_be_chosen_and_are_about_equal() -> None:
    first = computations(interleaved(Shape(2, 7, 2, group=3)).rows[0])
    assert [f"{a.kind.value}{a.micro_batch}.{a.chunk}" for a in first if a.kind is F] == [
        *(f"F{number}.{chunk}" for chunk in (0, 2) for number in range(4)),
        *(f"F{number}.{chunk}" for chunk in (0, 2) for number in range(4, 7)),
    ]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("1f1b", {"chunks": 2}, "'1f1b' has 1 chunk per rank, not 2"),
        ("zb-v", {"chunks": 3}, "'zb-v' has 2 chunks per rank, not 3"),
        ("interleaved", {"chunks": 1}, "needs 2 or more chunks per rank"),
        ("interleaved", {"group": 3}, "a group of 3 micro batches is smaller than the 4 ranks"),
        ("gpipe", {"group": 4}, "has no groups"),
        ("zb-h1", {"limit": 4}, "takes no memory limit"),
        ("zb-limited", {"limit": 0.5}, "a limit of 1 micro batch or more, not 0.5"),
    ],
)
def test_a_shape_that_a_schedule_does_not_serve_is_refused(name: str, changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SCHEDULES[name](replace(Shape(4, 8), **changes))


DRAWN: dict[tuple[str, int], tuple[str, str]] = {
    ("1f1b", 3): ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
    ("zb-v", 3): (
        "F0.0 F1.0 F2.0 F0.3 I0.3 W0.3 F1.3 I1.3 W1.3 I0.0 W0.0 F2.3 I2.3 W2.3 I1.0 W1.0 I2.0 W2.0",
        "F0.1 F0.2 F1.1 F1.2 I0.2 W0.2 F2.1 I0.1 W0.1 F2.2 I1.2 W1.2 I1.1 I2.2 I2.1 W1.1 W2.2 W2.1",
    ),
    ("zb-v", 2): (
        "F0.0 F1.0 F0.3 I0.3 W0.3 F1.3 I1.3 W1.3 I0.0 W0.0 I1.0 W1.0",
        "F0.1 F0.2 F1.1 F1.2 I0.2 W0.2 I0.1 W0.1 I1.2 W1.2 I1.1 W1.1",
    ),
}
"""Two ranks, by number of micro batches. ZB-V of 2 is that of 3 = 2p - 1 without the third one."""


@pytest.mark.parametrize(("name", "number"), DRAWN)
def test_a_schedule_of_two_ranks_and_few_micro_batches_is_the_one_drawn_by_hand(name: str, number: int) -> None:
    found = SCHEDULES[name](Shape(2, number))
    for rank, drawn in enumerate(DRAWN[name, number]):
        assert computations(found.rows[rank]) == row(drawn, rank, found.ranks)


def test_a_hand_over_between_two_chunks_of_one_rank_is_no_transfer() -> None:
    """In the shape of a V, the last rank has two consecutive chunks."""
    assert {a.peer for row in zb_v(Shape(2, 4)).rows for a in row} == {None, 0, 1}
    last = zb_v(Shape(2, 4)).rows[1]
    assert not [a for a in last if (a.kind, a.chunk) in ((SF, 1), (RF, 2), (SB, 2), (RB, 1))]
    assert {(a.chunk, a.kind) for a in last if a.kind not in COMPUTE} == {(1, RF), (1, SB), (2, SF), (2, RB)}


def test_a_table_is_made_and_proven_by_work_that_grows_with_its_actions_and_not_with_their_square() -> None:
    def calls(num_micro_batches: int) -> int:
        """What Python calls for it."""
        seen = 0

        def count(*_: object) -> None:
            nonlocal seen
            seen += 1

        shape = Shape(8, num_micro_batches)
        sys.setprofile(count)
        try:
            assert check(one_f_one_b.__wrapped__(shape), shape) == list(range(8, 0, -1))
        finally:
            sys.setprofile(None)
        return seen

    assert calls(128) < 2.5 * calls(64)


# What is refused.

GOOD = ("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 F0 RF1 B0 SB0 F1 B1 SB1")
FAULTS = """
    good                            | RF0 F0 RF1 B0 SB0               | 1 lacks B1 of chunk 1
    F0 SF0 F1 SF1 RB0 B0 RB1        | good                            | 0 lacks B1 of chunk 0
    F0 SF0 F1 RB0 B0 RB1 B1         | good                            | 0 lacks SF1 of chunk 0 to rank 1
    good                            | RF0 F0 RF1 B0 F1 B1 SB1         | 1 lacks SB0 of chunk 1 to rank 0
    good                            | RF0 F0 B0 SB0                   | 1 lacks B1 of chunk 1
    F0 SF0 F0 F1 SF1 RB0 B0 RB1 B1  | good                            | 0 runs F0 of chunk 0 twice
    F0 SF0 F1 SF1 RB0 B0 RB1 B1 SF0 | good                            | 0 runs SF0 of chunk 0 to rank 1 twice
    F0 SF0 F1 SF1 F2 RB0 B0 RB1 B1  | good                            | 0 must not run F2 of chunk 0
    good                            | RF0 F0 RF1 B0 SB0 F1 B1 SB1 SF0 | 1 must not run SF0 of chunk 1 to rank 2
    RF0 F0 SF0 F1 SF1 RB0 B0 RB1 B1 | good                            | 0 must not run RF0 of chunk 0 from rank -1
    F0 SF0 F1 SF1 RB0 B0 RB1 B1 F0.1| good                            | 0 must not run F0 of chunk 1: .* to rank 1
    F0 SF0 F1 SF1 RB0 B0 RB1 B1 F0.2| good                            | 0 must not run F0 of chunk 2: there are 2
    good                            | RF0 B0 SB0 F0 RF1 F1 B1 SB1     | 1 runs B0 of chunk 1 before F0 of chunk 1
    good                            | F0 RF0 RF1 B0 SB0 F1 B1 SB1     | 1 runs F0 of chunk 1 before RF0 of chunk 1 from
    F0 SF0 F1 SF1 B0 RB0 RB1 B1     | good                            | 0 runs B0 of chunk 0 before RB0 of chunk 0 from
    SF0 F0 F1 SF1 RB0 B0 RB1 B1     | good                            | 0 runs SF0 of chunk 0 to rank 1 before F0 of
    good                            | RF0 F0 RF1 SB0 B0 F1 B1 SB1     | 1 runs SB0 of chunk 1 to rank 0 before B0 of
    F0 SF0 F1 SF1 RB0 W0 I0 RB1 B1  | good                            | 0 runs W0 of chunk 0 before B0 of chunk 0
    F0 SF0 F1 SF1 RB0 B0 RB1 B1 W0  | good                            | 0 must not run B0 of chunk 0
    F0 SF0 F1 SF1 RB0 I0 RB1 B1     | good                            | 0 lacks W0 of chunk 0
    good                            | RF0 F0 B0 SB0 RF1 F1 B1 SB1     | 0 at SF1 of chunk 0 to rank 1, rank 1 at SB0 of
    good                            | RF1 F1 RF0 F0 B0 SB0 B1 SB1     | 0 at SF0 of chunk 0 to rank 1, rank 1 at RF1 of
"""
"""The rows of two ranks and two micro batches, of which one is faulty, and what the checker says of which rank.

Something is missing, twice, too much, or another's; comes too early; or two blocking sends wait for each other.
"""


@pytest.mark.parametrize("fault", FAULTS.strip().splitlines())
def test_a_planted_fault_is_named(fault: str) -> None:
    *rows, said = map(str.strip, fault.split("|"))
    faulty = table(*(good if text == "good" else text for text, good in zip(rows, GOOD, strict=True)))
    start = "blocking sends deadlock: rank" if " at " in said else "rank"
    with pytest.raises(ValueError, match=f"{start} {said}"):
        check(faulty, Shape(2, 2))


def test_a_send_to_a_rank_that_does_not_have_the_next_chunk_is_named() -> None:
    good = table(*GOOD)
    wrong = tuple(action._replace(peer=0) if action.kind is SF else action for action in good.rows[0])
    with pytest.raises(ValueError, match="rank 0 must not run SF0 of chunk 0 to rank 0"):
        check(replace(good, rows=(wrong, good.rows[1])), Shape(2, 2))


@pytest.mark.parametrize(
    ("changes", "shape", "said"),
    [
        ({"ranks": (0, 0)}, Shape(2, 2), r"\[2, 0\] of 2"),
        ({"ranks": (0, 1, 1)}, Shape(2, 2), r"\[1, 2\] of 3"),
        ({"ranks": (0, 1, 2)}, Shape(2, 2), r"\[1, 1\] of 3"),
        ({}, Shape(3, 2), "2 rows, and there are 3 ranks"),
        ({}, Shape(2, 2, chunks=2), "1 chunks, and 2 were asked for"),
        ({}, Shape(2, 2, limit=1), r"rank 0 holds .* 2 micro batches, more than the limit of 1: .* F1 of"),
    ],
)
def test_chunks_that_are_not_shared_out_evenly_and_another_shape_are_refused(
    changes: dict[str, tuple[int, ...]], shape: Shape, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check(replace(table(*GOOD), **changes), shape)


def test_a_table_is_good_and_may_mix_both_forms_of_a_backward_pass() -> None:
    assert check(table(*GOOD), Shape(2, 2)) == [2, 1]
    assert check(table("F0 F1 I0 W0 B1"), Shape(1, 2)) == [2]
    with pytest.raises(ValueError, match="W0 of chunk 0 twice"):
        check(table("F0 I0 W0 W0"), Shape(1, 1))


@given(st.data())
def test_a_good_table_that_loses_or_repeats_any_action_is_refused(data: st.DataObject) -> None:
    good, shape = drawn_table(data)
    rank = data.draw(st.integers(0, len(good.rows) - 1))
    own = good.rows[rank]
    at = data.draw(st.integers(0, len(own) - 1))
    left_out, repeated = (*own[:at], *own[at + 1 :]), (*own, own[at])
    for actions in (left_out, repeated):
        rows = (*good.rows[:rank], actions, *good.rows[rank + 1 :])
        with pytest.raises(ValueError, match=f"rank {rank} (lacks|runs|must not run) .*{own[at].micro_batch} of chunk"):
            check(replace(good, rows=rows), shape)


@given(st.data())
def test_the_checker_accepts_exactly_the_orders_that_blocking_processes_could_finish(data: st.DataObject) -> None:
    """Two neighbouring actions of a good table change places: an event-driven simulation says if that may be."""
    good, shape = drawn_table(data)
    rank = data.draw(st.integers(0, len(good.rows) - 1))
    at = data.draw(st.integers(0, len(good.rows[rank]) - 2))
    swapped = list(good.rows[rank])
    swapped[at : at + 2] = reversed(swapped[at : at + 2])
    changed = replace(good, rows=(*good.rows[:rank], tuple(swapped), *good.rows[rank + 1 :]))
    if finishes(changed):
        check(changed, shape)
    else:
        with pytest.raises(ValueError, match=r"before|deadlock"):
            check(changed, shape)


def drawn_table(data: st.DataObject) -> tuple[Table, Shape]:
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)))
    shape = Shape(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    return SCHEDULES[schedule](shape), shape


def finishes(schedule: Table) -> bool:
    """Whether processes that do these lists, with transfers that take both sides at once, all come to their end."""
    order = dependencies(schedule)
    done: set[tuple[int, Action]] = set()
    while True:
        ready = {event for event, needs in order.items() if event not in done and needs <= done}
        if not ready:
            return len(done) == len(order)
        done |= ready


def dependencies(schedule: Table) -> dict[tuple[int, Action], set[tuple[int, Action]]]:
    """What each action needs: what stands before it, before its counterpart (a transfer is one event), and its data."""
    order: dict[tuple[int, Action], set[tuple[int, Action]]] = {}
    for rank, actions in enumerate(schedule.rows):
        for action in actions:
            order[rank, action] = {(rank, need) for need in actions if needs(action, need)}
        for earlier, later in pairwise(actions):
            order[rank, later].add((rank, earlier))
    for rank, action in list(order):
        if action.peer is not None:
            kind = {SF: RF, RF: SF, SB: RB, RB: SB}[action.kind]
            other = Action(kind, action.micro_batch, action.chunk + FURTHER[action.kind], rank)
            position = schedule.rows[action.peer].index(other)
            if position > 0:
                order[rank, action].add((action.peer, schedule.rows[action.peer][position - 1]))
    return order


def needs(action: Action, other: Action) -> bool:
    """Whether `action` needs the result of `other`, an action of the same rank."""
    same = {F: (RF,), B: (F, RB), I: (F, RB), W: (I,), SF: (F,), SB: (B, I)}.get(action.kind, ())
    near = {F: ((F, -1),), B: ((B, 1), (I, 1)), I: ((B, 1), (I, 1))}.get(action.kind, ())
    distance = other.chunk - action.chunk
    known = [*((kind, 0) for kind in same), *near]
    return other.micro_batch == action.micro_batch and (other.kind, distance) in known


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("F0 B0", "B0 F0"), "the schedule deadlocks: rank 0 at B0 of chunk 0, rank 1 at B0 of chunk 1"),
        (("F1 F0 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1"), None),
        (("F0 B0 F1 B1", "F1 B1 F0 B0"), "the schedule deadlocks: rank 0 at B0 of chunk 0, rank 1 at F1 of chunk 1"),
    ],
)
def test_a_schedule_that_waits_for_itself_gets_no_transfers(rows: tuple[str, ...], said: str | None) -> None:
    given_rows = table(*rows)
    if said is None:
        assert [len(actions) for actions in with_transfers(given_rows.rows, given_rows.ranks).rows] == [8, 12, 8]
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        with_transfers(given_rows.rows, given_rows.ranks)
