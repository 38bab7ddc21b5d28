"""The watchdog: a run in which a process hangs ends with an error that names the rank for which the others wait."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from mplug import hookimpl

if TYPE_CHECKING:
    from mplug import Run, Send, Supervisor
    from mplug_launch import Monitor
    from mplug_watchdog.heartbeats import Durations, Heartbeats

LEAST_TIMEOUT = 3.0
"""Minimum of `timeout` in seconds: a process sends three heartbeats in this time."""
UNSUPERVISED_SECONDS = 1800.0
"""Minimum of torch's time-out for a collective if the watchdog is off."""
DAY = 24 * 3600.0


def _timeout_is_valid(value: float) -> float:
    if 0 < value < LEAST_TIMEOUT:
        raise ValueError(
            f"must be 0, or at least {LEAST_TIMEOUT:g} (a process sends one heartbeat per second), not {value:g}"
        )
    return value


class Watchdog:
    """Finds processes of a run that hang, and ends the run with an error that names the rank."""

    class Config(BaseModel):
        """Time-outs."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        timeout: Annotated[FiniteFloat, Field(ge=0, le=10**7), AfterValidator(_timeout_is_valid)] = Field(
            300.0,
            description="the run ends after this many seconds without a heartbeat, or without progress in a step; at "
            "least 3, or 0 to disable the watchdog",
        )
        first: Annotated[FiniteFloat, Field(ge=0, le=10**7)] = Field(
            1800.0,
            description="timeout in seconds for activities of unknown duration: building, loading, the first step "
            "(which compiles), the first evaluation and the first save",
        )
        multiple: Annotated[FiniteFloat, Field(ge=1, le=10**4)] = Field(
            10.0,
            description="a step, an evaluation or a save may take this many times as long as the longest one so far, "
            "if that is more than `timeout`",
        )

        recorder: Annotated[int, Field(ge=0, le=10**6)] = Field(
            2000,
            description="number of last collectives that torch's flight recorder keeps in each process, to name the "
            "rank that has not entered one; 0: none",
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self._durations: Durations | None = None

    @hookimpl
    def supervise(self, run: "Run") -> "Supervisor":
        """The object that watches a run."""
        from mplug_watchdog.clocks import ahead
        from mplug_watchdog.heartbeats import Durations, Heartbeats, Limits, main_thread
        from mplug_watchdog.recorder import last_entered, record

        if self.config.timeout and self.config.recorder:
            record(self.config.recorder)
        self._durations = Durations()
        limits = Limits(self.config.timeout, self.config.first, self.config.multiple)
        heartbeats = Heartbeats(run.rank, self._durations, limits, run.collectives_begun, main_thread)
        heartbeats.ahead = ahead
        # A process that begins its work again has aborted collectives, and torch's recorder keeps pointers to their
        # events: to read it there may crash.
        begins_again = bool(run.kept)
        heartbeats.recorded = last_entered if self.config.recorder and not begins_again else list
        return Watch(run, heartbeats)

    @hookimpl
    def activity_began(self, run: "Run") -> None:
        """Record the activity, for the next heartbeat."""
        if self._durations is not None:
            self._durations.begin(run.activity)


class Watch:
    """The supervisor of a run, in its launcher and in each of its processes."""

    def __init__(self, run: "Run", heartbeats: "Heartbeats") -> None:
        self._run, self._heartbeats, self._limits = run, heartbeats, heartbeats.limits

    @property
    def collective_seconds(self) -> float:
        """Much longer than the time-outs of the watchdog, if it is enabled."""
        timeout, first = self._limits.timeout, self._limits.first
        return max(DAY, 2 * timeout, 2 * first) if timeout else max(UNSUPERVISED_SECONDS, first)

    def monitor(self) -> "Monitor":
        """The launcher's listener. It finds no hang if the watchdog is off, because no heartbeat arrives."""
        from mplug_watchdog.transport import LauncherMonitor

        return LauncherMonitor(range(self._run.mesh.world_size))

    def report(self, send: "Send") -> AbstractContextManager[None]:
        """Send heartbeats to the launcher during the block."""
        from mplug_watchdog.transport import reporting

        self._heartbeats.rank = self._run.rank  # which the host sets after `supervise`
        return reporting(self._heartbeats, send) if self._limits.timeout else nullcontext()

    def exchange(self, attempt: str) -> AbstractContextManager[None]:
        """Exchange heartbeats with the other ranks during the block."""
        from mplug_watchdog.transport import exchanging

        self._heartbeats.rank, size = self._run.rank, self._run.mesh.world_size
        return exchanging(self._heartbeats, size, attempt) if self._limits.timeout else nullcontext()
