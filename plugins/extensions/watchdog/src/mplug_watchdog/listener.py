"""Find the ranks for which the others wait, from the heartbeats of all processes.

It is pure data: it reads no clock and starts no process. The launcher, or rank 0 under another launcher, feeds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mplug import Activity, listed
from mplug_launch import Hang
from mplug_watchdog.heartbeats import TICK, Beat, named_ranks
from mplug_watchdog.recorder import analysis, of_beat

LATE = 5 * TICK
"""Seconds without a heartbeat after which the last report of a process may be out of date."""
SHOWN = 8
"""Groups of ranks that an error lists."""


@dataclass
class LastBeat:
    """The last heartbeat of a rank, and the seconds since then, as far as the listener ran."""

    beat: Beat | None = None
    silent: float = 0.0
    has_ended: bool = False
    """Whether the machine of the rank reports that the process does not exist any more."""


@dataclass(frozen=True)
class Verdict:
    """The error that ends a run: its text, and the ranks for which the others wait, with their last heartbeats."""

    text: str
    ranks: tuple[int, ...]
    beats: tuple[Beat, ...]


class Listener:
    """The processes to which one process listens, with their last heartbeats. In a launcher, it is the monitor.

    `pass_time` gets the seconds between two turns of the process that listens; a turn counts for at most `longest`
    seconds. So the watchdog does not count the time in which the whole run was suspended. The last heartbeat of a
    process counts as current for `late` seconds.
    """

    def __init__(self, ranks: Iterable[int], longest: float = 2 * TICK, late: float = LATE) -> None:
        self.last_beats = {rank: LastBeat() for rank in ranks}
        self.longest, self.late = longest, late

    def hear(self, rank: int, content: Beat) -> None:
        """Store a heartbeat; ignore it if it is the stored one."""
        last = self.last_beats.get(rank)
        if last is None or (last.beat is not None and last.beat.number == content.number):
            return
        self.last_beats[rank] = LastBeat(content)
        if content.over:
            self.leave(rank)

    def begin_step(self, rank: int, step: int) -> None:
        """Store that a process begins a step, which is newer than its last heartbeat."""
        last = self.last_beats.get(rank)
        if last is not None and last.beat is not None:
            last.beat = replace(last.beat, phrase=Activity(Activity.STEP, step).phrase)

    def leave(self, rank: int) -> None:
        """Stop listening to a process that has ended or is about to end."""
        self.last_beats.pop(rank, None)

    def pass_time(self, seconds: float) -> None:
        """Count the seconds since the last call."""
        for last in self.last_beats.values():
            last.silent += min(seconds, self.longest)

    def hang(self, seconds: float) -> Hang | None:
        """The processes that hang, `seconds` after the last call, or None."""
        self.pass_time(seconds)
        verdict = self.verdict()
        return Hang(verdict.ranks, verdict.text) if verdict is not None else None

    def verdict(self) -> Verdict | None:
        """The error that must end the run, or None; with the collective that a rank has not entered, if it is known."""
        found = self.silence() or self._no_progress()
        if found is None:
            return None
        beats = {rank: last.beat for rank, last in self.last_beats.items() if last.silent <= self.late and last.beat}
        by_rank = {rank: [of_beat(one) for one in beat.last_collectives] for rank, beat in beats.items()}
        clause = analysis(by_rank, set(self.last_beats) - set(beats))
        return replace(found, text=f"{found.text}; {clause}") if clause else found

    def silence(self) -> Verdict | None:
        """The error for ranks that have sent no heartbeat for longer than the time-out, or None."""
        beats = [last.beat for last in self.last_beats.values() if last.beat is not None]
        if not beats:  # the processes are starting, or the watchdog is off
            return None
        timeout, first = max(beat.timeout for beat in beats), max(beat.first for beat in beats)
        never = [rank for rank, last in self.last_beats.items() if last.beat is None and last.silent > first]
        silent = {rank: last.silent for rank, last in self.last_beats.items() if last.beat is not None or rank in never}
        if max(silent.values()) <= timeout:
            return None
        ended = [beat for beat in beats if self.last_beats[beat.rank].has_ended]
        others = {rank: seconds for rank, seconds in silent.items() if not self.last_beats[rank].has_ended}
        longest = max(others.values(), default=0.0)
        # A broken link silences all ranks behind it within one or two ticks, so the error names them together.
        same_cause = max(timeout - 3 * TICK, timeout / 2) if longest > timeout else longest
        ranks = [rank for rank, seconds in others.items() if seconds > same_cause]
        of_ranks = [beat for beat in beats if beat.rank in ranks]
        never = [rank for rank in never if rank in ranks]
        groups = [
            *_groups(of_ranks, "last seen "),
            *([f"{named_ranks(never)}, before the first heartbeat,"] if never else []),
        ]
        clauses = [_death(ended)] if ended else []
        if groups:
            clauses.append(f"{_silence(groups, len(ranks), longest)} (extensions.watchdog.timeout={timeout:g} s)")
        return Verdict("; ".join(clauses), (*(beat.rank for beat in ended), *ranks), (*ended, *of_ranks))

    def _no_progress(self) -> Verdict | None:
        """The error for ranks whose main threads make no progress although all heartbeats arrive, or None."""
        beats = [last.beat for last in self.last_beats.values() if last.beat is not None and last.silent <= self.late]
        if not beats or len(beats) < len(self.last_beats):
            return None
        blocking = waited_for(beats)
        if not all(beat.quiet > beat.allowed for beat in blocking):
            return None
        quiet, allowed = min(beat.quiet for beat in blocking), max(beat.allowed for beat in blocking)
        limit = f"the watchdog allows {allowed:.0f} s here"
        ranks, places = tuple(beat.rank for beat in blocking), _listed(_groups(blocking, places=True))
        if len(blocking) == len(beats) > 1:
            text = f"no rank has made progress for {quiet:.0f} s, and no rank is behind the others: {places} ({limit})"
        else:
            waiting = " while the other ranks wait" if len(beats) > 1 else ""
            text = f"{places} made no progress for {quiet:.0f} s{waiting} ({limit})"
        return Verdict(text, ranks, tuple(blocking))


def waited_for(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks for which the others wait, as far as heartbeats show it; otherwise all ranks.

    1. The ranks that have begun the fewest activities are behind.
    2. Among these, a rank waits for another rank of a process group if it has begun more collectives of the group. The
       result is the ranks that wait for no rank and for which a rank waits.
    3. If no numbers differ, the result is the ranks that wait for their data loader; if there are none, those whose
       main thread does not seem to communicate.
    """
    fewest = min(beat.entered for beat in beats)
    behind = [beat for beat in beats if beat.entered == fewest]
    waiting, awaited = set[int](), set[int]()
    for group in {group for beat in behind for group in beat.collectives}:
        numbers = {beat.rank: beat.collectives[group] for beat in behind if group in beat.collectives}
        low, high = min(numbers.values()), max(numbers.values())
        waiting |= {rank for rank, number in numbers.items() if number > low}
        awaited |= {rank for rank, number in numbers.items() if number < high}
    candidates = (
        [beat for beat in behind if beat.rank in awaited - waiting],
        [beat for beat in behind if beat.reads],
        [beat for beat in behind if not beat.waits],
    )
    return next((beats for beats in candidates if beats), behind)


def _death(ended: Sequence[Beat]) -> str:
    """The clause for ranks whose processes do not exist any more."""
    has, its = ("has", "its machine") if len(ended) == 1 else ("have", "their machine")
    return f"{_listed(_groups(ended, 'last seen '))} {has} died or ended: {its} has no such process any more"


def _silence(groups: Sequence[str], num_ranks: int, seconds: float) -> str:
    """The clause for ranks from which no heartbeat arrives; whether their processes exist is unknown."""
    state = (
        "the process is suspended, it hangs in native code, or its machine is down or unreachable"
        if num_ranks == 1
        else "the processes are suspended, they hang in native code, or their machine is down or unreachable"
    )
    return f"{_listed(groups)} stopped sending heartbeats {seconds:.0f} s ago: {state}"


def _groups(beats: Sequence[Beat], when: str = "", places: bool = False) -> list[str]:
    """A phrase for each group of ranks with the same host and activity: 'ranks 2 and 3 on node02, in step 12,'."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for beat in beats:
        groups.setdefault((beat.host, beat.phrase, f" at {beat.at}" if places else ""), []).append(beat.rank)
    return [f"{named_ranks(ranks)} on {host}, {when}{phrase}{at}," for (host, phrase, at), ranks in groups.items()]


def _listed(groups: Sequence[str]) -> str:
    more = [f"{len(groups) - SHOWN} more groups of ranks"] if len(groups) > SHOWN else []
    return listed([*groups[:SHOWN], *more])
