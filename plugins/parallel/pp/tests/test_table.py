"""Tables of actions: the checker proves the good ones and names the fault of the others."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mplug_pp.schedules import SCHEDULES, gpipe, one_f_one_b
from mplug_pp.table import COMPUTE, Action, Kind, Table, check, with_transfers

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRADIENT
SF, RF, SB, RB = Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD
STAGES, MICRO_BATCHES = range(1, 9), range(1, 33)


def row(text: str) -> tuple[Action, ...]:
    """'F0 SF0' as actions."""
    words = (re.fullmatch("([A-Z]+)([0-9]+)", word) for word in text.split())
    return tuple(Action(Kind(word[1]), int(word[2])) for word in words if word)


def table(*rows: str) -> Table:
    return tuple(map(row, rows))


def text(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


# What is proven.


@pytest.mark.parametrize("num_stages", STAGES)
def test_gpipe_is_proven_and_holds_every_micro_batch(num_stages: int) -> None:
    for number in MICRO_BATCHES:
        assert check(gpipe(num_stages, number), number) == [number] * num_stages


@pytest.mark.parametrize("num_stages", STAGES)
def test_1f1b_is_proven_and_a_stage_holds_no_more_micro_batches_than_stages_follow(num_stages: int) -> None:
    for number in MICRO_BATCHES:
        peaks = check(one_f_one_b(num_stages, number), number)
        assert peaks == [min(num_stages - stage, number) for stage in range(num_stages)]


def test_1f1b_of_two_stages_and_three_micro_batches_is_the_one_drawn_by_hand() -> None:
    first, last = one_f_one_b(2, 3)
    assert text(tuple(a for a in first if a.kind in COMPUTE)) == "F0 F1 B0 F2 B1 B2"
    assert text(tuple(a for a in last if a.kind in COMPUTE)) == "F0 B0 F1 B1 F2 B2"


def clock(schedule: Table) -> int:
    """Units of time until the last action is done: a forward takes 1, a backward 2, and transfers nothing."""
    ends: dict[tuple[int, Action], int] = {}
    free, at = [0] * len(schedule), [0] * len(schedule)
    while any(position < len(actions) for position, actions in zip(at, schedule, strict=True)):
        for stage, actions in enumerate(schedule):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                source = {RF: (stage - 1, SF), RB: (stage + 1, SB)}.get(action.kind)
                awaited = (source[0], replace(action, kind=source[1])) if source else None
                if awaited is not None and awaited not in ends:
                    break
                start = max(free[stage], ends[awaited] if awaited else 0)
                free[stage] = ends[stage, action] = start + {F: 1, B: 2}.get(action.kind, 0)
                at[stage] += 1
    return max(free)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("number", [1, 4, 8, 32])
def test_a_pipeline_is_idle_for_no_more_than_its_filling_and_draining(name: str, num_stages: int, number: int) -> None:
    """(M + N - 1)(t_f + t_b): arXiv 2104.04473, section 2.2.1."""
    assert clock(SCHEDULES[name](num_stages, number)) == (number + num_stages - 1) * 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_computations_keep_their_order_when_transfers_are_added(name: str) -> None:
    for actions in SCHEDULES[name](4, 6):
        for kind in (F, B):
            assert [a.micro_batch for a in actions if a.kind is kind] == list(range(6))
    assert not any(action.kind not in COMPUTE for action in SCHEDULES[name](1, 6)[0])


def test_a_table_is_made_and_proven_by_work_that_grows_with_its_actions_and_not_with_their_square() -> None:
    def calls(num_micro_batches: int) -> int:
        """What Python calls for it."""
        seen = 0

        def count(*_: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(count)
        try:
            assert check(one_f_one_b(8, num_micro_batches), num_micro_batches) == list(range(8, 0, -1))
        finally:
            sys.setprofile(None)
        return seen

    assert calls(128) < 2.5 * calls(64)


# What is refused.

GOOD = ("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 F0 RF1 B0 SB0 F1 B1 SB1")
FAULTS = {
    "a forward is missing": (GOOD[0], "RF0 F0 RF1 B0 SB0 B1 SB1", "stage 1 lacks F1"),
    "a backward is missing": ("F0 SF0 F1 SF1 RB0 B0 RB1", GOOD[1], "stage 0 lacks B1"),
    "a send is missing": ("F0 SF0 F1 RB0 B0 RB1 B1", GOOD[1], "stage 0 lacks SF1"),
    "a send of a gradient is missing": (GOOD[0], "RF0 F0 RF1 B0 F1 B1 SB1", "stage 1 lacks SB0"),
    "a receive is missing": (GOOD[0], "RF0 F0 B0 SB0 F1 B1 SB1", "stage 1 lacks RF1"),
    "a forward is done twice": ("F0 SF0 F0 F1 SF1 RB0 B0 RB1 B1", GOOD[1], "stage 0 has the same action twice"),
    "a send is done twice": ("F0 SF0 F1 SF1 RB0 B0 RB1 B1 SF0", GOOD[1], "stage 0 has the same action twice"),
    "a micro batch too many": ("F0 SF0 F1 SF1 F2 RB0 B0 RB1 B1", GOOD[1], "stage 0 must not run F2"),
    "a send off the end": (GOOD[0], f"{GOOD[1]} SF0", "stage 1 must not run SF0"),
    "a receive before the start": (f"RF0 {GOOD[0]}", GOOD[1], "stage 0 must not run RF0"),
    "a backward before its forward": (GOOD[0], "RF0 B0 SB0 F0 RF1 F1 B1 SB1", "stage 1 runs B0 before F0"),
    "a forward before its receive": (GOOD[0], "F0 RF0 RF1 B0 SB0 F1 B1 SB1", "stage 1 runs F0 before RF0"),
    "a backward before its gradient": ("F0 SF0 F1 SF1 B0 RB0 RB1 B1", GOOD[1], "stage 0 runs B0 before RB0"),
    "a send before its forward": ("SF0 F0 F1 SF1 RB0 B0 RB1 B1", GOOD[1], "stage 0 runs SF0 before F0"),
    "a send before its backward": (GOOD[0], "RF0 F0 RF1 SB0 B0 F1 B1 SB1", "stage 1 runs SB0 before B0"),
    "a weight gradient before its backward": (
        "F0 SF0 F1 SF1 RB0 W0 B0 RB1 B1",
        GOOD[1],
        "stage 0 runs W0 before B0",
    ),
    "two blocking sends that cross": (
        GOOD[0],
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1",
        "blocking sends deadlock: stage 0 at SF1, stage 1 at SB0",
    ),
    "receives in another order than sends": (
        GOOD[0],
        "RF1 F1 RF0 F0 B0 SB0 B1 SB1",
        "blocking sends deadlock: stage 0 at SF0, stage 1 at RF1",
    ),
}
"""What is wrong -> the rows of two stages and two micro batches, and what the checker says."""


def test_the_table_that_faults_are_planted_in_is_good() -> None:
    assert check(table(*GOOD), 2) == [2, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    *rows, said = FAULTS[fault]
    with pytest.raises(ValueError, match=re.escape(said)):
        check(table(*rows), 2)


def test_weight_gradients_are_optional_but_come_once() -> None:
    assert check(table("F0 B0 W0"), 1) == [1]
    with pytest.raises(ValueError, match="stage 0 has the same action twice"):
        check(table("F0 B0 W0 W0"), 1)


@given(st.data())
def test_a_good_table_that_loses_or_repeats_any_action_is_refused(data: st.DataObject) -> None:
    rows, number = drawn_table(data)
    stage = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, len(rows[stage]) - 1))
    left_out = (*rows[stage][:at], *rows[stage][at + 1 :])
    repeated = (*rows[stage], rows[stage][at])
    for actions, said in ((left_out, f"stage {stage} lacks {rows[stage][at]}"), (repeated, "twice")):
        with pytest.raises(ValueError, match=said):
            check((*rows[:stage], actions, *rows[stage + 1 :]), number)


@given(st.data())
def test_the_checker_accepts_exactly_the_orders_that_blocking_processes_could_finish(data: st.DataObject) -> None:
    """Two neighbouring actions of a good table change places: an event-driven simulation says if that may be."""
    rows, number = drawn_table(data)
    stage = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, len(rows[stage]) - 2))
    swapped = list(rows[stage])
    swapped[at : at + 2] = reversed(swapped[at : at + 2])
    changed = (*rows[:stage], tuple(swapped), *rows[stage + 1 :])
    if finishes(changed):
        check(changed, number)
    else:
        with pytest.raises(ValueError, match=r"before|deadlock"):
            check(changed, number)


def drawn_table(data: st.DataObject) -> tuple[Table, int]:
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)))
    number = data.draw(st.integers(1, 6))
    return SCHEDULES[schedule](data.draw(st.integers(1, 4)), number), number


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
    for stage, actions in enumerate(schedule):
        for action in actions:
            order[stage, action] = {(stage, need) for need in data_needs(action) if need in actions}
        for earlier, later in pairwise(actions):
            order[stage, later].add((stage, earlier))
    for stage, action in list(order):
        pair = {SF: (RF, 1), RF: (SF, -1), SB: (RB, -1), RB: (SB, 1)}.get(action.kind)
        if pair is not None:
            other = (stage + pair[1], Action(pair[0], action.micro_batch))
            position = schedule[other[0]].index(other[1])
            if position > 0:
                order[stage, action].add((other[0], schedule[other[0]][position - 1]))
    return order


def data_needs(action: Action) -> list[Action]:
    needs = {F: [RF], B: [F, RB], W: [B], SF: [F], SB: [B]}.get(action.kind, [])
    return [Action(kind, action.micro_batch) for kind in needs]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("F0 B0", "B0 F0"), "the schedule deadlocks: stage 0 at B0, stage 1 at B0"),
        (("F1 F0 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1"), None),
        (("F0 B0 F1 B1", "F1 B1 F0 B0"), "the schedule deadlocks: stage 0 at B0, stage 1 at F1"),
    ],
)
def test_a_schedule_that_waits_for_itself_gets_no_transfers(rows: tuple[str, ...], said: str | None) -> None:
    if said is None:
        assert [len(actions) for actions in with_transfers(table(*rows))] == [8, 12, 8]
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        with_transfers(table(*rows))


# An independent schedule.


class Recorder:
    """Stands for a stage, and notes what a schedule makes it do."""

    has_backward = True

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.done = stage_index, num_stages, list[str]()
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1

    def forward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.done.append(f"F{number}")

    def backward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.done.append(f"B{number}")

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []  # no transfers


def done_by_torch(num_stages: int, number: int) -> list[str]:
    """What torch's own 1F1B makes each stage do.

    The loop that runs, not `_get_pipeline_order`: that plan, which only the visualizer reads, leaves F0 out of the last
    stage. The constructor is passed over, because it refuses fewer micro batches than stages.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules.Schedule1F1B, "_step_microbatches"):
        pytest.skip("this torch's 1F1B has no loop of its own")
    rows, batches = [], [()] * number
    for stage in range(num_stages):
        recorder, schedule = Recorder(stage, num_stages), object.__new__(schedules.Schedule1F1B)
        vars(schedule).update(_stage=recorder, _num_stages=num_stages, _n_microbatches=number, scale_grads=False)
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(schedule, name, lambda *_, **__: None)
        schedule._step_microbatches(batches, [{}] * number)
        rows.append(" ".join(recorder.done))
    return rows


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_1f1b_computes_in_the_order_in_which_torch_does(num_stages: int) -> None:
    for number in range(2, 33):
        ours = [[a for a in actions if a.kind in COMPUTE] for actions in one_f_one_b(num_stages, number)]
        assert [text(tuple(actions)) for actions in ours] == done_by_torch(num_stages, number)
