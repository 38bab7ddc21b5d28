"""A launcher whose processes outlive the death of one of them: they begin their work again, as another world.

The launcher serves the store at which the processes meet, so it outlives all of them. When a process dies, the launcher
sends each of the others a `Membership`: its rank in the next attempt, or that it waits as a spare. What the processes
do then is in `surviving`.
"""

import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mplug.distributed.supervision import Supervisor
from mplug.distributed.world import LOCALHOST
from mplug.errors import RunError
from mplug.run.launching import Healing, Stopped
from mplug_launch.launch import GRACE, PRELOADED
from mplug_launch.pipes import TERMINATED, Handler, Pipes, cause_of_death
from mplug_launch.surviving import PATIENCE, Done, Entered, GiveUp, Left, Membership, take_part

LEAVING = 30.0
"""Seconds in which a process that has done its work may end what plugins have begun."""
LATE = -1
"""The key of the result of a process that has done its work in an earlier attempt."""


def launch_survivors(
    size: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    port: int | None,
    supervisor: Supervisor | None,
    healing: Healing,
) -> Any:
    """Run `work(*arguments, send)` in `size` processes that outlive each other; the result of rank 0.

    Raises the errors of `launch` if the run cannot go on.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    multiprocessing.set_forkserver_preload(PRELOADED)
    store = TCPStore(LOCALHOST, port or 0, is_master=True, wait_for_workers=False)
    crew = Crew(size, store.port, supervisor, healing)
    with Handler(crew) as handler:
        crew.start(work, arguments)
        try:
            while not crew.is_done:
                crew.listen(0.2)
                crew.end_orphans()
                crew.end_hang()
                if handler.signal is not None and crew.is_between_steps:
                    crew.kill()
                    raise Stopped(handler.signal)
                if crew.dead() and not (handler.signal is None and crew.heal()):
                    crew.end_all()
                    if handler.signal is not None and not crew.failed_before(handler.when):
                        raise Stopped(handler.signal)
                    raise crew.first_failure(crew.exit_codes) or RunError("the processes of the run have ended")
        finally:
            crew.end_all()
    return crew.results[min(crew.results)]


class Crew(Pipes):
    """All processes of a launch, by a number that a process keeps, and the ranks of those that take part."""

    def __init__(self, size: int, port: int, supervisor: Supervisor | None, healing: Healing) -> None:
        super().__init__(size + healing.spares)
        self.size, self.port, self.supervisor, self.healing = size, port, supervisor, healing
        self.full, self.attempt = size, 0
        self.ranks = {number: number for number in range(size)}
        """The rank of each process that takes part."""
        self.gpus = dict(self.ranks)
        self.attempts: dict[int, int] = {}
        """The attempt that each process has entered."""
        self.results: dict[int, Any] = {}
        self.hung: set[int] = set()
        self.exit_codes: dict[int, int] = {}
        self.left: dict[int, float] = {}
        """When a process has left its work in this attempt."""
        self.processes: list[Any] = []
        self._watch()

    @property
    def is_done(self) -> bool:
        """Whether all ranks have done their work, or one before it has heard that another one has died meanwhile."""
        return len(self.results) == self.size or LATE in self.results

    @property
    def is_between_steps(self) -> bool:
        """Whether the run goes on after a death, and has not come to a step: its processes may not hear a signal."""
        return self.attempt > 0 and not self.steps

    def start(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start all processes."""
        context = multiprocessing.get_context("forkserver")
        for number in range(len(self.child_ends)):
            rehearse = None if number < self.size else self.healing.rehearse
            given = (number, self.child_ends, rehearse, work, *arguments)
            process = context.Process(target=take_part, args=given)
            process.start()
            self.processes.append(process)
        self._close_child_ends()  # the death of a process is seen from now on, also of one that never begins
        self._send_memberships()

    def hears(self, rank: int, message: object) -> bool:
        """Receive a message that only this launcher knows, or that a process has sent in an earlier attempt."""
        if isinstance(message, Entered):
            self.attempts[rank] = message.attempt
        elif isinstance(message, Left):
            self._leave(rank, message.attempt)
        elif isinstance(message, Done):
            self.results[self.ranks[rank] if message.attempt == self.attempt else LATE] = message.result
            self._end(rank, "done")
        else:
            is_end = message == TERMINATED or isinstance(message, tuple)
            return not is_end and self.attempts.get(rank) != self.attempt
        return True

    def rank_of(self, process: int) -> int:
        """The rank of a process; a number that is no rank if it does not take part."""
        return self.ranks.get(process, self.full + process)

    def processes_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """The numbers of the processes with these ranks, which hang."""
        found = [number for number, rank in self.ranks.items() if rank in ranks]
        self.hung.update(found)
        return found

    def end_hang(self) -> None:
        """Kill the processes that hang. One that has left its work sends no heartbeats, and the others wait for it."""
        if time.monotonic() - max(self.left.values(), default=-math.inf) > 2 * PATIENCE:
            super().end_hang()

    def _leave(self, number: int, attempt: int) -> None:
        """A process has left its work. If all have, none of them has died, and they need not wait for news."""
        if attempt != self.attempt:
            return
        self.left[number] = time.monotonic()
        if self.ranks.keys() <= self.left.keys():
            for line, other in self.own_ends.items():
                if other in self.ranks:
                    with suppress(OSError):  # that process has died in the meantime
                        line.send(GiveUp())

    def dead(self) -> list[int]:
        """The processes that take part and have failed. Spares that have died are forgotten."""
        self.ends = [end for end in self.ends if end[1] in self.ranks]
        failed = {number for _, number, _ in self._failures()}
        failed |= {number for _, number, message in self.ends if message == TERMINATED}
        return sorted(failed & self.ranks.keys())

    def end_orphans(self) -> None:
        """Kill what a dead process has forked, such as the workers of its loader.

        They hold its connections open, for whose end the launcher and the other ranks wait.
        """
        ended = {end[1] for end in self.ends}
        for number, process in enumerate(self.processes):
            if number not in ended and process.exitcode is not None:
                self._kill(number)

    def heal(self) -> bool:
        """Let the run go on without the processes that have died or hang; False if it cannot."""
        failures = {number: message for _, number, message in self._failures() if number in self.ranks}
        own_errors = [number for number, message in failures.items() if message is not None and number not in self.hung]
        if not failures or own_errors or self.results:
            return False
        sentences = [str(message[1]) if message else self._death_of(number) for number, message in failures.items()]
        alive = [number for number in sorted(self.ranks, key=self.ranks.__getitem__) if number not in failures]
        spares = [number for number in sorted(self.own_ends.values()) if number not in self.ranks]
        chosen = self._chosen(alive, spares)
        if chosen is None:
            return False
        self._go_on(chosen, failures)
        where = f"in {self.size} process{'es' * (self.size > 1)}"
        helpers = sum(number in spares for number in chosen.values())
        helped = f", with {helpers} spare process{'es' * (helpers > 1)}" if helpers else ""
        print(f"mplug: {'; '.join(sentences)}; the run goes on {where}{helped}", file=sys.stderr, flush=True)
        return True

    def _go_on(self, chosen: Mapping[int, int], failures: Collection[int]) -> None:
        """Begin the next attempt, in the processes `chosen` by their ranks; new ones take the GPUs of the dead."""
        gpus = [self.gpus[number] for number in failures]
        for number in chosen.values():
            if number not in self.gpus:
                self.gpus[number] = gpus.pop(0) if gpus else number
        self.ranks, self.size = {number: rank for rank, number in chosen.items()}, len(chosen)
        self.ends = [end for end in self.ends if end[1] not in failures]
        self.hung.clear()
        self.steps.clear()
        self.left.clear()
        self.attempt += 1
        self._watch()
        self._send_memberships()

    def _death_of(self, number: int) -> str:
        return f"{self._rank_name(number)} died {cause_of_death(self.exit_codes.get(number, 0))}"

    def _chosen(self, alive: list[int], spares: list[int]) -> dict[int, int] | None:
        """The processes of the next attempt by their ranks; None if they are too few.

        Survivors come first. Of more survivors than the layout needs, those stay that hold the whole state.
        """
        sizes = sorted({self.full, *self.healing.layouts}, reverse=True)
        size = next((size for size in sizes if size <= len(alive) + len(spares)), None)
        if size is None:
            return None
        if size == self.size:  # the dead ranks are replaced, and the others keep theirs
            chosen = {self.ranks[number]: number for number in alive}
            free = [rank for rank in range(size) if rank not in chosen]
            return chosen | dict(zip(free, spares, strict=False))
        for number in list(alive):
            rest = {self.ranks[other] for other in alive if other != number}
            if len(alive) > size and self.healing.covers(rest, self.size):
                alive.remove(number)
        return dict(enumerate([*alive, *spares][:size]))

    def _watch(self) -> None:
        self.monitor = self.supervisor.monitor() if self.supervisor else None
        for rank in range(self.size, self.full):
            if self.monitor is not None:
                self.monitor.leave(rank)

    def _send_memberships(self) -> None:
        for line, number in list(self.own_ends.items()):
            rank = self.ranks.get(number)
            if rank is not None or self.attempt:
                with suppress(OSError):  # that process has died in the meantime
                    line.send(Membership(self.attempt, rank, self.size, self.port, self.gpus.get(number, number)))

    def _end(self, rank: int, message: Any, seconds_ago: float = 0.0) -> None:
        super()._end(rank, message, seconds_ago)
        if message is None and rank < len(self.processes):
            self.processes[rank].join(1.0)
            self.exit_codes[rank] = self.processes[rank].exitcode or 0

    def end_all(self) -> None:
        """End the processes. Those that have done their work leave by themselves, and others may report an error."""
        if self.is_done:
            deadline = time.monotonic() + LEAVING
            for number in self.ranks.keys() & {end[1] for end in self.ends}:
                self.processes[number].join(max(deadline - time.monotonic(), 0))
        deadline = time.monotonic() + (0.0 if self.is_done else GRACE)
        while self.ranks.keys() - {end[1] for end in self.ends} and time.monotonic() < deadline:
            self.listen(0.1)
        self.kill()
        for process in self.processes:
            process.join(GRACE)
