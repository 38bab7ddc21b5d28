"""A process that hangs: which rank a run names, after how long, and what is no hang."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mplug.distributed import heartbeat_transport as beating
from mplug.distributed.groups import Groups
from mplug.distributed.heartbeat_transport import Exchange, beating_to, watching
from mplug.distributed.heartbeats import (
    EVALUATION,
    LONGEST_WRITE,
    SAVES,
    SAVING,
    STEP,
    TICK,
    WRITING,
    Beat,
    Heart,
    Limits,
    Place,
    Pulse,
    born,
    collectives_begun,
    main_thread,
)
from mplug.distributed.launch import Pipes
from mplug.distributed.watchdog import Ward, waited_for
from mplug.errors import RunError
from mplug.layout.ranks import Grouping
from mplug.training.assembly import build
from mplug.training.feed import Feed
from mplug.training.loop import train
from mplug.training.position import Position

LIMITS = Limits(timeout=300, first=1800, multiple=10)
BEAT = Beat(
    rank=0,
    number=1,
    host="node01",
    pid=1,
    born="",
    phrase="in step 5",
    entered=7,
    collectives={},
    quiet=0,
    allowed=300,
    timeout=300,
    first=1800,
    at="loader.py:88 in read",
)


class Ranks:
    """A run as its listener sees it: in each second, every rank that is not `stopped` sends a heartbeat."""

    def __init__(self, *beats: Beat) -> None:
        self.beats = {rank: replace(beat, rank=rank) for rank, beat in enumerate(beats)}
        self.ward = Ward(self.beats)
        self.stopped: set[int] = set()
        self.second = 0

    def seconds_until_verdict(self, limit: int, progress: Mapping[int, bool] | None = None) -> tuple[int, str] | None:
        """When the run ends, and why; None if it goes on for `limit` seconds. Ranks with `progress` are never quiet."""
        for second in range(1, limit + 1):
            self.second += 1
            self.ward.pass_time(1.0)
            for rank, beat in self.beats.items():
                if rank not in self.stopped:
                    quiet = 0.0 if progress and progress.get(rank) else beat.quiet + 1.0
                    self.beats[rank] = replace(beat, number=beat.number + 1, quiet=quiet)
                    self.ward.hear(self.beats[rank])
            if (verdict := self.ward.verdict()) is not None:
                return second, verdict.text
        return None


EVERYONE = dict.fromkeys(range(4), True)


def test_the_rank_whose_heartbeats_cease_is_named_within_seconds_of_the_timeout() -> None:
    ranks = Ranks(BEAT, BEAT, replace(BEAT, host="node02"), BEAT)
    assert ranks.seconds_until_verdict(1000, progress=EVERYONE) is None
    ranks.stopped = {2}
    found = ranks.seconds_until_verdict(1000)
    assert found is not None
    assert 300 <= found[0] <= 302
    assert found[1].startswith("rank 2 on node02, last seen in step 5, stopped sending heartbeats 301 s ago")
    assert "watchdog.timeout=300 s" in found[1]


def test_all_ranks_behind_a_cut_link_are_named_together() -> None:
    there = replace(BEAT, host="node02")
    ranks = Ranks(BEAT, BEAT, there, there)
    assert ranks.seconds_until_verdict(1, progress=EVERYONE) is None
    ranks.stopped = {3}
    assert ranks.seconds_until_verdict(2, progress=EVERYONE) is None  # they beat at different moments
    ranks.stopped = {2, 3}
    found = ranks.seconds_until_verdict(1000)
    assert found is not None
    assert found[1].startswith("ranks 2 and 3 on node02, last seen in step 5, stopped sending heartbeats")


def test_a_run_that_is_suspended_as_a_whole_goes_on() -> None:
    ranks = Ranks(BEAT, BEAT)
    assert ranks.seconds_until_verdict(10, progress=EVERYONE) is None
    ranks.ward.pass_time(100_000.0)
    assert ranks.ward.verdict() is None
    assert ranks.seconds_until_verdict(10, progress=EVERYONE) is None


def test_a_process_that_never_beats_may_start_as_long_as_an_unmeasured_activity() -> None:
    ranks = Ranks(BEAT, BEAT)
    ranks.stopped = {1}
    found = ranks.seconds_until_verdict(3000, progress=EVERYONE)
    assert found is not None
    assert 1800 <= found[0] <= 1802
    assert found[1].startswith("rank 1, before the first heartbeat, stopped")


def test_processes_without_heartbeats_and_those_that_are_done_are_not_watched() -> None:
    silent = Ward(range(2))
    for _ in range(10_000):
        silent.pass_time(TICK)
    assert silent.verdict() is None
    ranks = Ranks(BEAT, BEAT)
    ranks.ward.hear(replace(BEAT, rank=1, over=True))
    ranks.stopped = {1}
    assert ranks.seconds_until_verdict(5000, progress=EVERYONE) is None


# All heartbeats come, and the main threads are stuck.


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


def test_a_stuck_main_thread_is_named_with_its_place() -> None:
    found = Ranks(*in_groups(dp_0123=(9, 9, 8, 9))).seconds_until_verdict(1000)
    assert found is not None
    assert 300 <= found[0] <= 302
    assert found[1].startswith("rank 2 on node01, in step 5 at loader.py:88 in read, made no progress for 301 s")


def test_where_no_rank_is_behind_the_error_says_so_and_lists_all() -> None:
    found = Ranks(*[replace(BEAT, waits=True)] * 4).seconds_until_verdict(1000)
    assert found is not None
    assert "no rank has made progress for 301 s, and no rank is behind the others: ranks 0, 1, 2 and 3" in found[1]


def test_ranks_that_wait_for_a_long_phase_of_another_do_not_trip() -> None:
    """Rank 0 saves for the first time, which may take 1,800 s; the others are in the next step already."""
    ahead = replace(BEAT, entered=8)
    saving = replace(BEAT, phrase="saving step 5", allowed=1800)
    ranks = Ranks(saving, ahead, ahead, ahead)
    assert ranks.seconds_until_verdict(1799) is None
    found = ranks.seconds_until_verdict(10)
    assert found is not None
    assert found[1].startswith("rank 0 on node01, saving step 5 at")


def test_nobody_is_blamed_on_old_facts_while_a_process_may_be_suspended() -> None:
    """Rank 2's last heartbeat is old: it is not yet time to name it, and rank 1, which waits for it, is not named."""
    beats = in_groups(dp_0123=(9, 8, 9, 9))
    ranks = Ranks(*[replace(beat, quiet=290) for beat in beats])
    ranks.ward.hear(ranks.beats[2])
    ranks.stopped = {2}
    assert ranks.seconds_until_verdict(299) is None
    found = ranks.seconds_until_verdict(10)
    assert found is not None
    assert found[1].startswith("rank 2 ")


# What a process reports.


def heart(pulse: Pulse, begun: Callable[[], Mapping[str, int]] = dict, place: Callable[[], int] = int) -> Heart:
    return Heart(3, pulse, LIMITS, begun, lambda: Place("file.py:1 in f", place(), reads=False, waits=False))


def test_a_limit_follows_the_longest_activity_of_its_kind() -> None:
    pulse = Pulse()
    beats = heart(pulse)
    pulse.enter(STEP, 1)
    for _ in range(100):
        beats.beat(TICK)
    assert beats.beat(TICK).allowed == 1800
    pulse.enter(STEP, 2)
    assert beats.beat(TICK).allowed == pytest.approx(1010)
    pulse.enter(EVALUATION, 2)
    assert beats.beat(TICK).allowed == 1800
    pulse.enter(SAVING, 2)
    assert beats.beat(TICK).allowed == 1800
    pulse.enter(EVALUATION, 3)
    assert beats.beat(TICK).allowed == 300
    assert beats.beat(TICK).phrase == "in the evaluation after step 3"


def test_the_first_activity_of_a_kind_which_compiles_sets_no_limit_once_there_is_a_second() -> None:
    pulse = Pulse()
    beats, allowed = heart(pulse), []
    for step, seconds in enumerate((600, 50, 40, 70, 60)):
        pulse.enter(STEP, step)
        for _ in range(seconds):
            beats.beat(TICK)
        allowed.append(pulse.allowed(LIMITS))
    assert allowed == pytest.approx([1800, 6000, 500, 500, 700])


def test_a_wait_for_an_asynchronous_write_is_no_save_and_may_take_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves return after a second of staging, and every wait for what they write takes an hour."""
    run = tiny_run({"trainer.steps": 2, "checkpoint.every": 1, "trainer.eval_every": 0})
    run.directory = tmp_path / "run"
    activities, over = list[str](), list[float]()
    beats, enter = Heart(0, run.pulse, LIMITS, dict, lambda: Place("", 0, reads=False, waits=False)), run.pulse.enter

    def entering(activity: str, step: int = 0) -> None:
        enter(activity, step)
        activities.append(activity)

    def taking(seconds: int) -> None:
        found = [beats.beat(TICK) for _ in range(seconds)]
        over.extend(beat.quiet for beat in found if beat.quiet > beat.allowed)

    saver = SimpleNamespace(
        wait=lambda: taking(3600), saved=list, expected_seconds=float, let_finish=lambda: None, expect=lambda _: None
    )
    monkeypatch.setattr("mplug.training.position.Saver", lambda _: saver)
    monkeypatch.setattr(Position, "save", lambda _: taking(1))
    monkeypatch.setattr(run.pulse, "enter", entering)
    train(run)
    assert over == []
    first = activities.index(STEP)
    saved = [activity for activity in activities[first:] if activity != EVALUATION]
    assert saved == [STEP, WRITING, SAVING, STEP, WRITING, SAVING, WRITING, "ending the run"]
    assert LONGEST_WRITE > 3600


def test_collectives_of_the_thread_that_saves_are_progress_and_name_no_rank() -> None:
    pulse, begun = Pulse(), {"dp": 3, f"{SAVES} 7": 5}
    beats = heart(pulse, lambda: dict(begun))
    counted = dict[str, int]()
    for activity in (STEP, EVALUATION, SAVING, WRITING):
        pulse.enter(activity, 1)
        counted[activity] = len(beats.beat(TICK).collectives)
    assert counted == {STEP: 1, EVALUATION: 1, SAVING: 2, WRITING: 2}
    pulse.enter(STEP, 2)
    assert [beats.beat(TICK).quiet for _ in range(2)] == [0, 1]
    begun[f"{SAVES} 7"] += 1
    assert beats.beat(TICK).quiet == 0


def test_progress_is_a_new_activity_or_collective_and_in_an_unmeasured_activity_a_main_thread_that_moves() -> None:
    pulse, begun, places = Pulse(), {"dp": 0}, iter(range(1000))
    beats = heart(pulse, lambda: dict(begun), lambda: next(places))
    pulse.enter(STEP, 1)
    assert [beats.beat(TICK).quiet for _ in range(3)] == [0, 0, 0]  # it compiles
    pulse.enter(STEP, 2)
    assert [beats.beat(TICK).quiet for _ in range(3)] == [0, 1, 2]
    begun["dp"] += 1
    assert [beats.beat(TICK).quiet for _ in range(2)] == [0, 1]
    pulse.enter(STEP, 3)
    assert [beats.beat(TICK).quiet for _ in range(2)] == [0, 1]


def test_the_time_in_which_a_process_is_suspended_is_no_time_without_progress() -> None:
    pulse = Pulse()
    beats = heart(pulse)
    beats.beat(TICK)
    assert beats.beat(100_000).quiet <= 2 * TICK
    assert pulse.clock <= 3 * TICK


class Asks:
    """A loader whose next micro batch asks another thread where the main thread is."""

    vocab_size = 2

    def take(self, num_samples: int) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            yield {"sample_ids": torch.tensor([pool.submit(self.look).result()])}

    def look(self) -> int:
        self.place = main_thread()
        return 0


def test_a_main_thread_that_waits_for_its_loader_is_recognized_with_the_line() -> None:
    loader = Asks()
    next(Feed(loader, "cpu").take(1))  # type: ignore[arg-type]
    assert loader.place.reads
    assert "test_watchdog.py:" in loader.place.at
    assert loader.place.at.endswith("in take")
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(main_thread).result().reads


def begun_after(numbers: list[int]) -> tuple[dict[str, int], bool]:
    groups, names = Groups(dist.get_rank()), dist.distributed_c10d._world.pg_names
    pair = groups.of(Grouping(("dp",), (2,), (2,)))
    assert pair is not None
    name, names[pair] = names[pair], f"split {dist.get_rank()}"  # as the names of split groups can be
    assert groups.beside().group_desc == SAVES
    dist.barrier(group=groups.beside())
    dist.barrier(group=groups.beside("votes"))
    assert len([name for name in collectives_begun() if name.startswith(SAVES)]) == 1
    before = collectives_begun()
    works = [dist.all_reduce(torch.ones(1), group=pair, async_op=True) for _ in range(numbers[dist.get_rank()])]
    after = collectives_begun()
    for work in works[: min(numbers)]:
        work.wait()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=pair)  # so that rank 0 can end
    names[pair] = name
    return grown, before.keys() == after.keys()


def test_the_collectives_that_a_rank_has_begun_are_counted_by_group_and_alike_on_its_ranks() -> None:
    (first, same), (second, _) = run_workers(2, begun_after, [3, 2])
    assert same
    assert first.keys() == second.keys()
    assert [*first.values(), *second.values()] == [3, 2]


# On their way.


def test_the_launcher_hears_heartbeats_and_kills_the_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.killpg", lambda pid, _: killed.append(pid))
    lines = Pipes(2)
    lines.pids = {0: 1000, 1: 1001}  # as `Started` tells them
    for rank, end in enumerate(lines.child_ends):
        end.send(replace(BEAT, rank=rank))
        end.send(9)  # a step begins after the heartbeat
    for _ in range(2):
        lines.listen(0.0)
    lines.ward.last_beats[1].silent = 301.0
    lines.watch()
    assert killed == [1001]
    assert str(lines.first_failure({})).startswith("rank 1 on node01, last seen in step 9, stopped sending heartbeats")
    assert lines.failing_for() > 0
    lines.watch()
    assert killed == [1001]
    lines.close()


def test_a_process_that_ends_well_says_so_in_its_last_heartbeat() -> None:
    heard: list[Beat] = []
    with beating_to(heard.append, heart(Pulse())):
        pass
    assert [beat.over for beat in heard][-1]
    with pytest.raises(ZeroDivisionError), beating_to(heard.append, heart(Pulse())):
        raise ZeroDivisionError
    assert not heard[-1].over


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
    monkeypatch.setattr(beating, "TICK", 0.05)
    return store


def exchange(rank: int, timeout: float, size: int = 3) -> Recorded:
    limits = Limits(timeout, 60, 10)
    pulse = Pulse()
    pulse.enter(STEP, 4)
    beats = Heart(rank, pulse, limits, dict, lambda: Place("a.py:1 in f", 0, reads=False, waits=True))
    return Recorded(beats, size=size, attempt="0")


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_through_a_store_every_rank_learns_which_one_stopped(store: TCPStore) -> None:
    ranks = [exchange(rank, timeout=3) for rank in range(3)]
    with ranks[0].running(), ranks[1].running():
        ranks[2]._exchange(ranks[2]._connected())  # one heartbeat
        until(lambda: ranks[0].text and ranks[1].text)
    assert ranks[0].text == ranks[1].text
    assert ranks[0].text.startswith("rank 2 on ")
    assert "last seen in step 4, stopped sending heartbeats" in ranks[0].text


def test_without_the_heartbeats_of_rank_0_the_others_name_it(store: TCPStore) -> None:
    ranks = [exchange(rank, timeout=2) for rank in range(3)]
    ranks[0]._exchange(ranks[0]._connected())
    with ranks[1].running():
        until(lambda: ranks[1].text)
    assert ranks[1].text.startswith("rank 0 on ")


def test_a_store_that_does_not_answer_is_rank_0s_machine(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = exchange(1, timeout=1)
    answers = threading.Event()
    monkeypatch.setattr(rank, "_exchange", lambda _: answers.wait(60))
    with rank.running():
        until(lambda: rank.text)
        answers.set()  # before the block joins the thread
    assert rank.text.startswith("rank 0 stopped answering")
    assert rank.address in rank.text


def test_a_broken_connection_is_explained_by_the_rank_that_is_gone(store: TCPStore) -> None:
    peers = [exchange(rank, timeout=60) for rank in (0, 2)]
    peers[1]._exchange(peers[1]._connected())
    own = exchange(1, timeout=60).heart
    with peers[0].running(), pytest.raises(RunError) as failure, watching(own, size=3, attempt="0"):
        raise RuntimeError("Connection closed by peer [10.0.0.2]")
    assert str(failure.value).startswith("rank 2 on ")
    assert "died or is unreachable" in str(failure.value)
    assert "Connection closed by peer" in str(failure.value.__cause__)


def test_a_standstill_is_found_where_many_ranks_beat_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    own = exchange(0, timeout=300, size=2048)
    assert own.interval == 8
    own._latest = replace(own._latest, quiet=301, allowed=300)
    for rank in range(1, 2048):
        own.ward.hear(replace(own._latest, rank=rank))
    own.ward.pass_time(own.interval)
    verdict = own._verdict()
    assert verdict is not None
    assert "no rank has made progress for 301 s" in verdict.text


def test_an_error_of_the_connection_to_the_store_ends_nothing(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:99"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        dist.DistBackendError("a collective of another rank was aborted"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_connection_in_the_code_of_a_plugin_names_the_rank_that_is_gone(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    peers = [exchange(rank, timeout=60) for rank in (0, 2)]
    peers[1]._exchange(peers[1]._connected())
    run = tiny_run({"trainer.steps": 2})
    run.directory = tmp_path / "run"
    plugin = dict[str, Any](__name__="mplug_adamw.waiting", error=error)
    exec("def step(*_, **__):\n    raise error", plugin)
    monkeypatch.setattr(type(build(run).optimizer), "step", plugin["step"])
    own = exchange(1, timeout=60).heart
    with peers[0].running(), pytest.raises(RunError) as failure, watching(own, size=3, attempt="0"):
        train(run)
    assert str(failure.value).startswith("rank 2 on ")
    assert failure.value.__cause__ is error


def test_a_process_is_known_by_its_beginning() -> None:
    assert born(os.getpid()) == born(os.getpid()) != ""
    assert born(2**22 + 1) == ""
