"""A process that hangs: which rank a run names, after how long, and what is no hang."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_watchdog import Watch, transport
from mplug_watchdog import heartbeats as sending
from mplug_watchdog.heartbeats import LONGEST_WRITE, TICK, Beat, Durations, Heartbeats, Limits, Place, main_thread
from mplug_watchdog.listener import Listener, waited_for
from mplug_watchdog.transport import Exchange, exchanging, reporting
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mplug import Activity, RunError
from mplug.training.assembly import build
from mplug.training.feed import Feed
from mplug.training.loop import train
from mplug_launch import PluginMessage
from mplug_launch.pipes import Pipes
from mplug_saving.position import Position
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_run

STEP, EVALUATION, SAVING, WRITING = Activity.STEP, Activity.EVALUATION, Activity.SAVING, Activity.WRITING
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


# What a process reports.


def nothing_begun() -> dict[str, dict[str, int]]:
    return {"main": {}, "saves": {}}


def heartbeats(
    durations: Durations,
    begun: Callable[[], Mapping[str, Mapping[str, int]]] = nothing_begun,
    place: Callable[[], int] = int,
) -> Heartbeats:
    return Heartbeats(3, durations, LIMITS, begun, lambda: Place("file.py:1 in f", place(), reads=False, waits=False))


def enter(durations: Durations, name: str, step: int) -> None:
    durations.begin(Activity(name, step, durations.activity.number + 1))


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


class Recorded(Exchange):
    """An exchange that ends nothing, and keeps why it would."""

    text = ""

    def _end(self, text: str, named: Any) -> None:
        self.text = self.text or text
        self._over.set()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A store at which the exchanges of this process meet, twenty times a second."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(transport, "TICK", 0.05)
    return store


def exchange(rank: int, timeout: float, size: int = 3) -> Recorded:
    limits, durations = Limits(timeout, 60, 10), Durations()
    enter(durations, STEP, 4)
    place = Place("a.py:1 in f", 0, reads=False, waits=True)
    return Recorded(Heartbeats(rank, durations, limits, nothing_begun, lambda: place), size=size, attempt="0")


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize(("stopped", "others"), [(2, (0, 1)), (0, (1,))])
@pytest.mark.wide("kills", quick=["0-others1"])
def test_all_ranks_read_the_name_of_the_stopped_rank_from_the_store(
    store: TCPStore, stopped: int, others: tuple[int, ...]
) -> None:
    ranks = [exchange(rank, timeout=3 - (stopped == 0)) for rank in range(3)]
    with ExitStack() as stack:
        for rank in others:
            stack.enter_context(ranks[rank].running())
        ranks[stopped]._exchange(ranks[stopped]._connected())  # one heartbeat
        until(lambda: all(ranks[rank].text for rank in others))
    (text,) = {ranks[rank].text for rank in others}
    assert text.startswith(f"rank {stopped} on ")
    assert "last seen in step 4, stopped sending heartbeats" in text


@pytest.mark.wide("loggers")
def test_if_the_store_does_not_answer_the_error_names_rank_0_and_its_machine(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = exchange(1, timeout=1)
    answers = threading.Event()
    monkeypatch.setattr(rank, "_exchange", lambda _: answers.wait(60))
    with rank.running():
        until(lambda: rank.text)
        answers.set()  # before the block joins the thread
    assert rank.text.startswith("rank 0 stopped answering")
    assert rank.address in rank.text


def test_a_standstill_is_found_although_heartbeats_of_many_ranks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    own = exchange(0, timeout=300, size=2048)
    assert own.interval == 8
    own._latest = replace(own._latest, quiet=301, allowed=300)
    for rank in range(1, 2048):
        own.listener.hear(rank, replace(own._latest, rank=rank))
    own.listener.pass_time(own.interval)
    verdict = own._verdict()
    assert verdict is not None
    assert "no rank has made progress for 301 s" in verdict.text


def test_an_error_of_the_connection_to_the_store_does_not_end_the_run(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, peers, calls = exchange(1, timeout=60), exchange(0, timeout=60), list[Any]()
    peers._exchange(peers._connected())
    done = rank._exchange

    def failing_at_first(connection: Any) -> None:
        calls.append(connection)
        if len(calls) in (2, 4):
            raise RuntimeError("Connection reset by peer")
        done(connection)

    monkeypatch.setattr(rank, "_exchange", failing_at_first)
    with rank.running():
        until(lambda: len(calls) > 5, seconds=5)
    assert rank.text == ""
    assert len({id(connection) for connection in calls[:5]}) == 3


@pytest.mark.wide("loggers", quick=["True-DistBackendError", "False-RuntimeError0"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:99"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        dist.DistBackendError("a collective of another rank was aborted"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("in_a_plugin", [False, True])
def test_the_error_for_a_broken_connection_names_the_lost_rank(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, in_a_plugin: bool
) -> None:
    peers = [exchange(rank, timeout=60) for rank in (0, 2)]
    peers[1]._exchange(peers[1]._connected())
    code = dict[str, Any](__name__="mplug_adamw.waiting", error=error)
    exec("def step(*_, **__):\n    raise error", code)
    run = tiny_run({"trainer.steps": 2})
    run.directory = tmp_path / "run"
    if in_a_plugin:
        monkeypatch.setattr(type(build(run).optimizer), "step", code["step"])
    own = exchange(1, timeout=60).heartbeats
    with peers[0].running(), pytest.raises(RunError) as failure, exchanging(own, size=3, attempt="0"):
        train(run) if in_a_plugin else code["step"]()
    assert str(failure.value).startswith("rank 2 on ")
    assert "died or is unreachable" in str(failure.value)
    assert failure.value.__cause__ is error


def test_a_process_is_identified_by_its_start_time() -> None:
    assert sending.born(os.getpid()) == sending.born(os.getpid()) != ""
    assert sending.born(2**22 + 1) == ""


def collective_seconds(**settings: float) -> float:
    run = tiny_run({"extensions.watchdog": settings})
    watch: Watch = run.hooks.call.supervise(run=run)
    return watch.collective_seconds


def test_torch_ends_a_collective_long_after_the_watchdog_acts() -> None:
    assert collective_seconds() == 24 * 3600
    assert collective_seconds(timeout=1e5, first=1e6) >= 2e6
    assert collective_seconds(timeout=0, first=3600) == 3600
    assert collective_seconds(timeout=0, first=60) == 1800


def test_a_timeout_of_0_sends_no_heartbeat() -> None:
    run, sent = tiny_run({"extensions.watchdog.timeout": 0}), list[Any]()
    watch: Watch = run.hooks.call.supervise(run=run)
    with watch.report(sent.append), watch.exchange("job"):
        pass
    assert sent == []
