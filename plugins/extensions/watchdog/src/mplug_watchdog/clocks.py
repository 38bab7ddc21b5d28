"""Clocks that jump, from the heartbeats of all processes: an operator or a time service sets the clock of a machine.

Time-outs, durations and losses of a run use other clocks. Dates in logs and files, `--max-minutes`, and certificates
that a storage service checks use this one.
"""

import time

from mplug_watchdog.heartbeats import TICK, Beat, named_ranks

LEAST = 2.0
"""Seconds of the smallest jump. A time service corrects smaller differences by less than a millisecond per second."""
TOGETHER = 2.5 * TICK
"""Seconds in which all processes of a machine have sent a heartbeat after a jump."""


class Clocks:
    """Compares each heartbeat of a process with the one before it."""

    def __init__(self) -> None:
        self._last: dict[int, Beat] = {}
        self._jumps: list[tuple[Beat, float]] = []
        self._waited = 0.0

    def hear(self, beat: Beat) -> None:
        """Store a heartbeat, and the jump since the last one of the same process."""
        last = self._last.get(beat.rank)
        self._last[beat.rank] = beat
        if last is not None and (last.host, last.pid, last.born) == (beat.host, beat.pid, beat.born):
            jump = beat.ahead - last.ahead
            if abs(jump) >= LEAST:
                self._jumps.append((beat, jump))

    def sentences(self, seconds: float) -> list[str]:
        """A sentence for the ranks of each machine whose clock has jumped, `seconds` after the last call."""
        self._waited = self._waited + seconds if self._jumps else 0.0
        if self._waited < TOGETHER:
            return []
        found: dict[tuple[str, int], list[Beat]] = {}
        for beat, jump in self._jumps:
            found.setdefault((beat.host, round(jump)), []).append(beat)
        self._jumps, self._waited = [], 0.0
        return [
            f"the clock of {named_ranks([beat.rank for beat in beats])} on {host} jumped {abs(jump):,} s "
            f"{'forward' if jump > 0 else 'back'} {beats[0].phrase}; the run goes on: its losses and time-outs do not "
            f"depend on this clock, but dates in logs and --max-minutes do"
            for (host, jump), beats in found.items()
        ]


def ahead() -> float:
    """Seconds by which the clock of the machine is ahead of its monotonic clock: constant except for jumps."""
    for _ in range(3):
        before = time.monotonic()
        found = time.time() - before
        if time.monotonic() - before < LEAST / 4:  # otherwise the process was suspended between the two
            break
    return found
