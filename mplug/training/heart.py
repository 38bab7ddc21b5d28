"""The heartbeat of a run: what it reports, and within which limits."""

from typing import TYPE_CHECKING

from mplug.distributed.heartbeats import Heart, Limits, collectives_begun, main_thread

if TYPE_CHECKING:
    from mplug.run.run import Run


def heart_of(run: "Run") -> Heart | None:
    """The maker of this process's heartbeats; None if `watchdog.timeout` is 0."""
    section = run.config.watchdog
    limits = Limits(section.timeout, section.first, section.multiple)
    return Heart(run.rank, run.pulse, limits, collectives_begun, main_thread) if limits.timeout else None
