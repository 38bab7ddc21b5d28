"""Which rank do the others wait for? Decided from the heartbeats of all processes, without a clock or a process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mplug.distributed.heartbeats import PHRASES, STEP, TICK, Beat
from mplug.errors import listed

LATE = 5 * TICK
"""Seconds without a heartbeat after which a process may be suspended: what it reported last may be old."""
SHOWN = 8
"""Groups of ranks that an error lists."""


@dataclass
class Heard:
    """The last heartbeat of a rank, and the seconds since then in which the listener ran."""

    beat: Beat | None = None
    silent: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Why a run must end, in a sentence, and the ranks that the others wait for."""

    text: str
    ranks: tuple[int, ...]
    beats: tuple[Beat, ...]


class Ward:
    """The processes that one process listens to.

    Time is what `pass_time` counts. The listener reports the time between two of its own turns, and no turn counts for
    more than `longest` seconds. So a run that is suspended as a whole, and continued later, has lost no time. The last
    heartbeat of a process counts as current for `late` seconds.
    """

    def __init__(self, ranks: Iterable[int], longest: float = 2 * TICK, late: float = LATE) -> None:
        self.heard = {rank: Heard() for rank in ranks}
        self.longest, self.late = longest, late

    def hear(self, beat: Beat) -> None:
        """Take a heartbeat; one that was heard before counts for nothing."""
        heard = self.heard.get(beat.rank)
        if heard is None or (heard.beat is not None and heard.beat.number == beat.number):
            return
        self.heard[beat.rank] = Heard(beat)
        if beat.over:
            self.leave(beat.rank)

    def note_step(self, rank: int, step: int) -> None:
        """A process says that it begins a step, which is newer than what its last heartbeat says."""
        heard = self.heard.get(rank)
        if heard is not None and heard.beat is not None:
            heard.beat = replace(heard.beat, words=PHRASES[STEP].format(step))

    def leave(self, rank: int) -> None:
        """A process has ended, or is about to: nobody waits for its heartbeats."""
        self.heard.pop(rank, None)

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed since the last call."""
        for heard in self.heard.values():
            heard.silent += min(seconds, self.longest)

    def verdict(self) -> Verdict | None:
        """Why the run must end; None while all is well."""
        return self.silence() or self._standstill()

    def silence(self) -> Verdict | None:
        """The ranks whose heartbeats have ceased; None while none has for longer than the time-out."""
        beats = [heard.beat for heard in self.heard.values() if heard.beat is not None]
        if not beats:  # the processes are starting, or do not beat at all
            return None
        timeout, first = max(beat.timeout for beat in beats), max(beat.first for beat in beats)
        never = [rank for rank, heard in self.heard.items() if heard.beat is None and heard.silent > first]
        silent = {rank: heard.silent for rank, heard in self.heard.items() if heard.beat is not None or rank in never}
        longest = max(silent.values())
        if longest <= timeout:
            return None
        # A cut link silences all ranks behind it within a tick or two.
        alike = max(timeout - 3 * TICK, timeout / 2)
        ranks = tuple(rank for rank, seconds in silent.items() if seconds > alike)
        last = [beat for beat in beats if beat.rank in ranks]
        who = [*_groups(last, "last heard "), *([f"{_ranks(never)}, before the first heartbeat,"] if never else [])]
        state = (
            "it is suspended, it hangs in native code, or its machine is down or unreachable"
            if len(ranks) == 1
            else "they are suspended, they hang in native code, or their machine is down or unreachable"
        )
        text = (
            f"{_shown(who)} stopped sending heartbeats {longest:.0f} s ago: {state} (watchdog.timeout is {timeout:g} s)"
        )
        return Verdict(text, ranks, tuple(last))

    def _standstill(self) -> Verdict | None:
        """The ranks whose main threads are stuck while all heartbeats come."""
        beats = [heard.beat for heard in self.heard.values() if heard.beat is not None and heard.silent <= self.late]
        if not beats or len(beats) < len(self.heard):
            return None
        found = waited_for(beats)
        if not all(beat.quiet > beat.allowed for beat in found):
            return None
        quiet, allowed = min(beat.quiet for beat in found), max(beat.allowed for beat in found)
        limit = f"the watchdog allows {allowed:.0f} s here"
        ranks, places = tuple(beat.rank for beat in found), _shown(_groups(found, places=True))
        if len(found) == len(beats) > 1:
            text = f"no rank has made progress for {quiet:.0f} s, and none is behind the others: {places} ({limit})"
        else:
            waiting = " while the other ranks wait" if len(beats) > 1 else ""
            text = f"{places} made no progress for {quiet:.0f} s{waiting} ({limit})"
        return Verdict(text, ranks, tuple(found))


def waited_for(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks that the others wait for, as far as their heartbeats tell; all ranks where they do not.

    A rank that has begun fewer activities is behind. Among equals, a rank waits for another of the same process group
    if it has begun more of the group's collectives; the ranks at the end of such chains are waited for. If no numbers
    differ, a rank that waits for its loader, or for nothing that looks like communication, is.
    """
    fewest = min(beat.entered for beat in beats)
    behind = [beat for beat in beats if beat.entered == fewest]
    waiting, awaited = set[int](), set[int]()
    for group in {group for beat in behind for group in beat.collectives}:
        numbers = {beat.rank: beat.collectives[group] for beat in behind if group in beat.collectives}
        low, high = min(numbers.values()), max(numbers.values())
        waiting |= {rank for rank, number in numbers.items() if number > low}
        awaited |= {rank for rank, number in numbers.items() if number < high}
    for found in (
        [beat for beat in behind if beat.rank in awaited - waiting],
        [beat for beat in behind if beat.reads],
        [beat for beat in behind if not beat.waits],
    ):
        if found:
            return found
    return behind


def _groups(beats: Sequence[Beat], when: str = "", places: bool = False) -> list[str]:
    """'ranks 2 and 3 on node02, last heard in step 12,': ranks that say the same of themselves stand together."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for beat in beats:
        groups.setdefault((beat.host, beat.words, f" at {beat.at}" if places else ""), []).append(beat.rank)
    return [f"{_ranks(ranks)} on {host}, {when}{words}{at}," for (host, words, at), ranks in groups.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(map(str, sorted(ranks)))}"


def _shown(groups: Sequence[str]) -> str:
    more = [f"{len(groups) - SHOWN} more groups of ranks"] if len(groups) > SHOWN else []
    return listed([*groups[:SHOWN], *more])
