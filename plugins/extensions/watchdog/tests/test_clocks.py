"""A clock that jumps: which ranks the launcher names, and that no other difference counts."""

import time
from dataclasses import replace
from typing import Any

import pytest
from mplug_watchdog.clocks import ahead
from mplug_watchdog.heartbeats import TICK, Beat
from mplug_watchdog.transport import LauncherMonitor

LIMITS: dict[str, Any] = {"quiet": 0.0, "allowed": 300.0, "timeout": 300.0, "first": 1800.0}
PLACE: dict[str, Any] = {"phrase": "in step 5", "entered": 7, "collectives": {}, "at": "loader.py:88 in read"}
BEAT = Beat(rank=0, number=1, host="node01", pid=1, born="7", **PLACE, **LIMITS)
RANKS = {0: "node01", 1: "node01", 2: "node02", 3: "node02"}


def said(capfd: pytest.CaptureFixture[str], *rounds: dict[int, Beat]) -> str:
    """What a launcher prints that hears these heartbeats, one round of them a second."""
    monitor = LauncherMonitor(RANKS)
    for number, beats in enumerate(rounds):
        for rank, beat in beats.items():
            monitor.hear(rank, replace(beat, rank=rank, host=RANKS[rank], number=number))
        assert monitor.hang(TICK) is None
    return capfd.readouterr().err


def test_a_sentence_names_all_ranks_of_the_machine_whose_clock_jumps(capfd: pytest.CaptureFixture[str]) -> None:
    same, later = replace(BEAT, ahead=1e9), replace(BEAT, ahead=1e9 - 3600.2, phrase="in step 6")
    usual = dict.fromkeys(RANKS, same)
    text = said(capfd, usual, {**usual, 3: later}, {**usual, 2: later, 3: later}, *[{0: same, 2: later, 3: later}] * 3)
    assert text.startswith("mplug: the clock of ranks 2 and 3 on node02 jumped 3,600 s back in step 6; the run goes on")
    assert text.count("mplug:") == 1


def test_a_corrected_clock_and_another_process_of_the_rank_are_no_jump(capfd: pytest.CaptureFixture[str]) -> None:
    """A spare process may be on another machine; a time service corrects slowly."""
    rounds = [{0: replace(BEAT, ahead=1e9 + 0.5 * second)} for second in range(10)]
    assert said(capfd, *rounds, *[{0: replace(BEAT, pid=2, ahead=5.0)}] * 5) == ""


def test_a_process_sees_the_jump_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = ahead(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    assert ahead() - before == pytest.approx(86_400, abs=1.0)
