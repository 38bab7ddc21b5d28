"""Heartbeats of a process that begins activities when the test says so."""

from mplug_watchdog.heartbeats import Durations

from mplug import Activity

STEP, EVALUATION, SAVING, WRITING = Activity.STEP, Activity.EVALUATION, Activity.SAVING, Activity.WRITING


# What a process reports.


def nothing_begun() -> dict[str, dict[str, int]]:
    return {"main": {}, "saves": {}}


def enter(durations: Durations, name: str, step: int) -> None:
    durations.begin(Activity(name, step, durations.activity.number + 1))
