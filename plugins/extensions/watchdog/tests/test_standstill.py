"""The store of heartbeats: how ranks find the one that stands still, and a connection that breaks."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from heartbeats import STEP, enter, nothing_begun
from mplug_watchdog import Watch, transport
from mplug_watchdog import heartbeats as sending
from mplug_watchdog.heartbeats import Durations, Heartbeats, Limits, Place
from mplug_watchdog.transport import Exchange, exchanging
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mplug import RunError
from mplug.training.assembly import build
from mplug.training.loop import train
from mplug_testing.harness import tiny_run


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


def test_a_process_on_the_machine_of_a_dead_one_tells_rank_0_that_it_exists_no_more(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is on another machine. The process id of rank 2 is now that of another process."""
    ranks, here = [exchange(rank, timeout=3) for rank in range(3)], socket.gethostname
    stores = [rank._connected() for rank in ranks]
    ranks[2]._latest = replace(ranks[2]._latest, born="1")
    for turn in (2, 0, 0, 1, 0):
        monkeypatch.setattr(socket, "gethostname", here if turn else lambda: "node09")
        ranks[turn]._exchange(stores[turn])
        for _ in range(60):
            ranks[0].listener.pass_time(1.0)
    ranks[0].listener.leave(1)
    text = ranks[0].listener.silence().text  # type: ignore[union-attr]
    assert text.endswith("last seen in step 4, has died or ended: its machine has no such process any more")


def test_a_heartbeat_is_new_when_it_is_read(store: TCPStore) -> None:
    """Else one that comes a second late has the age of two that are missing, and its rank is named beside another."""
    ranks = [exchange(rank, timeout=3) for rank in range(2)]
    ranks[1]._exchange(ranks[1]._connected())
    ranks[0]._over.set()
    ranks[0]._exchange_all(ranks[0]._connected())  # a single turn
    assert ranks[0].listener.last_beats[1].silent == 0.0


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


def test_a_rank_0_that_has_died_or_ends_with_an_error_is_not_called_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has named the rank whose death has broken its connection, and its store is gone."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    rank = exchange(1, timeout=5)
    rank.first = replace(rank._latest, rank=0, phrase="in step 4")
    assert "last seen in step 4, has died or ended: its machine answers" in str(rank.lost_rank())
    with socket.create_server(("127.0.0.1", 0)) as server:  # a process that is suspended
        rank.address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "last seen in step 4, stopped answering" in rank._without_store()
    rank.first = replace(rank._latest, rank=0, phrase="ending with a RuntimeError")
    assert "last seen ending with a RuntimeError, has ended, and says why" in rank._without_store()


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
