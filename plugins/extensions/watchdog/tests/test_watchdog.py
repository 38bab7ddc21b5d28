"""A process that hangs: which rank a run names, after how long, and what is no hang."""

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heartbeats import EVALUATION, SAVING, STEP, WRITING, enter, nothing_begun
from mplug_watchdog import Watch
from mplug_watchdog.heartbeats import LONGEST_WRITE, TICK, Beat, Durations, Heartbeats, Limits, Place, main_thread
from mplug_watchdog.listener import Listener, waited_for
from mplug_watchdog.transport import reporting

from mplug import Activity
from mplug.training.feed import Feed
from mplug.training.loop import train
from mplug_launch import PluginMessage
from mplug_launch.pipes import Pipes
from mplug_saving.position import Position
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_run

LIMITS = Limits(timeout=300, first=1800, multiple=10)
FIELDS: dict[str, Any] = {"rank": 0, "number": 1, "host": "node01", "pid": 1, "born": "", "collectives": {}, "quiet": 0}
BEAT = Beat(**FIELDS, phrase="in step 5", entered=7, allowed=300, timeout=300, first=1800, at="loader.py:88 in read")
NO_EFFECT = "it decides when a run that hangs ends, and no run of the suite hangs"


class TestWatchdog(ExtensionSuite):
    plugin = "watchdog"
    without_effect = {"timeout": NO_EFFECT, "first": NO_EFFECT, "multiple": NO_EFFECT, "recorder": NO_EFFECT}


class Ranks:
    """A run as its listener sees it: in each second, every rank that is not `stopped` sends a heartbeat."""

    def __init__(self, *beats: Beat) -> None:
        self.beats = {rank: replace(beat, rank=rank) for rank, beat in enumerate(beats)}
        self.listener = Listener(self.beats)
        self.stopped: set[int] = set()

    def until_verdict(self, limit: int, progress: bool = False) -> tuple[int, str]:
        """When the run ends and why; (0, "") if it goes on for `limit` seconds. With `progress`, no rank is quiet."""
        for second in range(1, limit + 1):
            self.listener.pass_time(1.0)
            for rank, beat in self.beats.items():
                if rank not in self.stopped:
                    self.beats[rank] = replace(beat, number=beat.number + 1, quiet=0.0 if progress else beat.quiet + 1)
                    self.listener.hear(rank, self.beats[rank])
            if (verdict := self.listener.verdict()) is not None:
                return second, verdict.text
        return 0, ""


def test_runs_that_were_suspended_have_ended_or_send_no_heartbeats_continue() -> None:
    ranks = Ranks(BEAT, BEAT)
    assert ranks.until_verdict(10, progress=True) == (0, "")
    ranks.listener.pass_time(100_000.0)
    assert ranks.listener.verdict() is None
    ranks.listener.hear(1, replace(BEAT, rank=1, number=99, over=True))
    ranks.stopped = {1}
    assert ranks.until_verdict(5000, progress=True) == (0, "")
    silent = Listener(range(2))
    for _ in range(10_000):
        silent.pass_time(TICK)
    assert silent.verdict() is None


def in_groups(**groups: tuple[int, ...]) -> list[Beat]:
    """Ranks with these numbers of collectives: 'tp_01=(3, 4)' are those of ranks 0 and 1 in a group of the two."""
    found = [BEAT] * 4
    for name, numbers in groups.items():
        for rank, number in zip(map(int, name.partition("_")[2]), numbers, strict=True):
            found[rank] = replace(found[rank], rank=rank, collectives={**found[rank].collectives, name: number})
    return found


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        (in_groups(dp_0123=(9, 9, 8, 9)), [2]),
        (in_groups(dp_0123=(9, 8, 8, 9)), [1, 2]),
        # Rank 3 waits for its tensor-parallel partner 2, rank 0 for its data-parallel partner 2, and rank 1 for rank 3.
        (in_groups(tp_01=(40, 40), tp_23=(37, 38), dp_02=(5, 4), dp_13=(5, 4)), [2]),
        ([replace(beat, entered=8 - (beat.rank == 3)) for beat in in_groups(dp_0123=(9, 8, 9, 9))], [3]),
        # Point-to-point messages are not counted: who reads data, or does not communicate, is waited for.
        ([replace(beat, reads=beat.rank == 1, waits=True) for beat in in_groups(pp_0123=(2, 2, 2, 2))], [1]),
        ([replace(beat, waits=beat.rank != 1) for beat in in_groups(pp_0123=(2, 2, 2, 2))], [1]),
        ([replace(beat, waits=True) for beat in in_groups(pp_0123=(2, 2, 2, 2))], [0, 1, 2, 3]),
        # Every rank waits for another.
        ([replace(beat, waits=True) for beat in in_groups(a_01=(3, 4), b_10=(3, 4), c_23=(1, 1))], [0, 1, 2, 3]),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(beats: list[Beat], named: list[int]) -> None:
    assert [beat.rank for beat in waited_for(beats)] == named


THERE, SAVES = replace(BEAT, host="node02"), replace(BEAT, phrase="saving step 5", allowed=1800)
QUIET = [replace(beat, quiet=290) for beat in in_groups(dp_0123=(9, 8, 9, 9))]
STUCK = in_groups(dp_0123=(9, 9, 8, 9))
Phases = list[tuple[int, set[int]]]


@pytest.mark.parametrize(
    ("beats", "progress", "before", "stopped", "seconds", "words"),
    [
        # Heartbeats stop after these seconds, in which these ranks were stopped.
        ([BEAT, BEAT, THERE, BEAT], True, [(1000, set())], {2}, (300, 302), "rank 2 on node02, last seen in step 5, "),
        ([BEAT, BEAT, THERE, THERE], True, [(1, set()), (2, {3})], {2, 3}, (1, 1000), "ranks 2 and 3 on node02, last "),
        ([BEAT, BEAT], True, [], {1}, (1800, 1802), "rank 1, before the first heartbeat, stopped"),
        # All heartbeats come, and the main threads are stuck.
        (STUCK, False, [], set(), (300, 302), "rank 2 on node01, in step 5 at loader.py:88 in read, made no progress"),
        ([replace(BEAT, waits=True)] * 4, False, [], set(), (300, 302), "no rank has made progress for 301 s, and no "),
        # Rank 0 saves for the first time, which may take 1,800 s; the others are in the next step already.
        ([SAVES, replace(BEAT, entered=8)], False, [], set(), (1800, 1809), "rank 0 on node01, saving step 5 at"),
        # The last heartbeat of rank 2 is old, and it is not yet time to name it. Rank 1 waits for it, and is not named.
        (QUIET, False, [(1, set())], {2}, (299, 309), "rank 2 "),
    ],
)
def test_the_run_ends_in_time_with_the_ranks_for_which_the_others_wait(
    beats: list[Beat], progress: bool, before: Phases, stopped: set[int], seconds: tuple[int, int], words: str
) -> None:
    ranks = Ranks(*beats)
    for duration, ranks.stopped in before:
        assert ranks.until_verdict(duration, progress) == (0, "")
    ranks.stopped = stopped
    second, text = ranks.until_verdict(3000, progress)
    assert seconds[0] <= second <= seconds[1]
    assert text.startswith(words)
    if progress:
        assert re.search(r"stopped sending heartbeats \d+ s ago: .* \(extensions\.watchdog\.timeout=300 s\)", text)
    if words.startswith("no rank"):
        assert "no rank is behind the others: ranks 0, 1, 2 and 3" in text


@pytest.mark.parametrize(
    ("others", "clause"), [(299.0, ""), (301.0, "; rank 2 on node02, last seen in step 5, stopped ")]
)
def test_a_process_that_exists_no_more_is_not_called_suspended_and_late_ranks_are_not_named_with_it(
    others: float, clause: str
) -> None:
    listener = Listener(range(3))
    for rank, beat in enumerate((BEAT, BEAT, THERE)):
        listener.hear(rank, replace(beat, rank=rank))
    listener.last_beats[1].silent, listener.last_beats[1].has_ended = 301.0, True
    listener.last_beats[2].silent = others
    verdict = listener.silence()
    assert verdict is not None
    start = "rank 1 on node01, last seen in step 5, has died or ended: its machine has no such process any more"
    assert verdict.text.startswith(start + clause)
    assert verdict.ranks == ((1, 2) if clause else (1,))


def heartbeats(
    durations: Durations,
    begun: Callable[[], Mapping[str, Mapping[str, int]]] = nothing_begun,
    place: Callable[[], int] = int,
) -> Heartbeats:
    return Heartbeats(3, durations, LIMITS, begun, lambda: Place("file.py:1 in f", place(), reads=False, waits=False))


def lasting(beats: Heartbeats, seconds: int) -> Beat:
    """The last heartbeat of these seconds."""
    return [beats.next(TICK) for _ in range(seconds)][-1]


def test_a_limit_follows_the_longest_activity_of_its_kind() -> None:
    durations = Durations()
    beats = heartbeats(durations)
    steps = ((STEP, 1, 1800), (STEP, 2, 1010), (EVALUATION, 2, 1800), (SAVING, 2, 1800), (EVALUATION, 3, 300))
    for activity, step, allowed in steps:
        enter(durations, activity, step)
        assert lasting(beats, 101 if allowed == 1800 and activity == STEP else 1).allowed == pytest.approx(allowed)
    assert beats.next(TICK).phrase == "in the evaluation after step 3"


def test_the_second_duration_of_an_activity_replaces_the_first_which_compiles() -> None:
    durations = Durations()
    beats, allowed = heartbeats(durations), []
    for step, seconds in enumerate((600, 50, 40, 70, 60)):
        enter(durations, STEP, step)
        lasting(beats, seconds)
        allowed.append(durations.allowed(LIMITS))
    assert allowed == pytest.approx([1800, 6000, 500, 500, 700])


def test_a_step_after_a_change_of_the_layout_may_last_as_long_as_the_first_one() -> None:
    durations = Durations()
    beats, allowed = heartbeats(durations), []
    for activity in (STEP, STEP, STEP, Activity.RELAYOUT, STEP):
        enter(durations, activity, 1)
        allowed.append(durations.allowed(LIMITS))
        lasting(beats, 1)
    assert allowed == [1800, 300, 300, 1800, 1800]


@pytest.mark.wide("loggers")
def test_a_wait_for_an_asynchronous_write_may_take_hours_and_does_not_count_as_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves return after a second of staging, and every wait for what they write takes an hour."""
    settings = {"trainer.steps": 2, "checkpoint.every": 1, "trainer.eval_every": 0, "extensions.watchdog.timeout": 300}
    run = tiny_run(settings)
    run.directory = tmp_path / "run"
    watch = run.hooks.call.supervise(run=run)
    assert isinstance(watch, Watch)
    beats, activities, over = watch._heartbeats, list[str](), list[float]()
    monkeypatch.setattr(beats, "place", lambda: Place("", 0, reads=False, waits=False))
    original = run.enter

    def recorded(activity: str, step: int = 0) -> None:
        original(activity, step)
        activities.append(activity)

    def taking(seconds: int) -> None:
        found = [beats.next(TICK) for _ in range(seconds)]
        over.extend(beat.quiet for beat in found if beat.quiet > beat.allowed)

    saver = SimpleNamespace(
        wait=lambda: taking(3600), saved=list, expected_seconds=float, let_finish=lambda: None, expect=lambda _: None
    )
    monkeypatch.setattr("mplug_saving.position.Saver", lambda _: saver)
    monkeypatch.setattr(Position, "save", lambda _: taking(1))
    monkeypatch.setattr(run, "enter", recorded)
    train(run)
    assert over == []
    first = activities.index(STEP)
    saved = [activity for activity in activities[first:] if activity != EVALUATION]
    assert saved == [STEP, WRITING, SAVING, STEP, WRITING, SAVING, WRITING, "ending the run"]
    assert LONGEST_WRITE > 3600


def test_collectives_of_the_thread_that_saves_are_progress_and_name_no_rank() -> None:
    durations, begun = Durations(), {"main": {"dp": 3}, "saves": {"all": 5}}
    beats = heartbeats(durations, lambda: deepcopy(begun))
    counted = dict[str, int]()
    for activity in (STEP, EVALUATION, SAVING, WRITING):
        enter(durations, activity, 1)
        counted[activity] = len(beats.next(TICK).collectives)
    assert counted == {STEP: 1, EVALUATION: 1, SAVING: 2, WRITING: 2}
    enter(durations, STEP, 2)
    assert [beats.next(TICK).quiet for _ in range(2)] == [0, 1]
    begun["saves"]["all"] += 1
    assert beats.next(TICK).quiet == 0


def test_progress_is_a_new_activity_or_collective_and_in_an_unmeasured_activity_a_main_thread_that_moves() -> None:
    durations, begun, places = Durations(), {"main": {"dp": 0}, "saves": {}}, iter(range(1000))
    beats = heartbeats(durations, lambda: deepcopy(begun), lambda: next(places))
    enter(durations, STEP, 1)
    assert [beats.next(TICK).quiet for _ in range(3)] == [0, 0, 0]  # it compiles
    enter(durations, STEP, 2)
    assert [beats.next(TICK).quiet for _ in range(3)] == [0, 1, 2]
    begun["main"]["dp"] += 1
    assert [beats.next(TICK).quiet for _ in range(2)] == [0, 1]
    enter(durations, STEP, 3)
    assert [beats.next(TICK).quiet for _ in range(2)] == [0, 1]
    assert beats.next(100_000).quiet <= 3 * TICK, "time in which the process is suspended does not count"
    assert durations.clock <= 12 * TICK


class Asks:
    """A loader whose next micro batch asks another thread where the main thread is."""

    vocab_size = 2

    def take(self, num_samples: int) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            yield {"sample_ids": torch.tensor([pool.submit(self.look).result()])}

    def look(self) -> int:
        self.place = main_thread()
        return 0


def test_a_heartbeat_says_that_the_main_thread_waits_for_its_loader_and_where() -> None:
    loader = Asks()
    next(Feed(loader, "cpu").take(1))  # type: ignore[arg-type]
    assert loader.place.reads
    assert "test_watchdog.py:" in loader.place.at
    assert loader.place.at.endswith("in take")
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(main_thread).result().reads


# On their way.


def test_the_launcher_kills_the_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.killpg", lambda pid, _: killed.append(pid))
    listener = Listener(range(2))
    lines = Pipes(2, listener)
    lines.pids = {0: 1000, 1: 1001}  # as `Started` tells them
    for rank, end in enumerate(lines.child_ends):
        end.send(PluginMessage(replace(BEAT, rank=rank)))
        end.send(9)  # a step begins after the heartbeat
    for _ in range(2):
        lines.listen(0.0)
    listener.last_beats[1].silent = 301.0
    lines.end_hang()
    assert killed == [1001]
    assert str(lines.first_failure({})).startswith("rank 1 on node01, last seen in step 9, stopped sending heartbeats")
    assert lines.failing_for() > 0
    lines.end_hang()
    assert killed == [1001]
    lines.close()


def test_the_last_heartbeat_says_whether_the_process_ended_without_an_error() -> None:
    heard: list[Any] = []
    with reporting(heartbeats(Durations()), heard.append):
        pass
    assert heard[-1].content.over
    with pytest.raises(ZeroDivisionError), reporting(heartbeats(Durations()), heard.append):
        raise ZeroDivisionError
    assert not heard[-1].content.over
