"""Copies of a run's state in the memory of its processes, and the continuation of the run from them.

Each rank keeps what it would write to a checkpoint, and a second copy of what one other rank (`keeper`) would write. It
copies the boxes of that rank that it holds itself (replicas), and receives the others. So the state survives the death
of any one process, and of several if no two of them keep the same boxes. A process keeps the last two generations. It
drops the older one when it begins a new one: all ranks have completed the last one by then.
"""

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

import torch

from mplug.distributed.world import attempt
from mplug.errors import UsageError
from mplug.run.run import Run
from mplug_heal.intervals import best_interval, lost_share
from mplug_heal.keepers import keeper
from mplug_heal.live_state import LiveState, capture
from mplug_heal.parts import continue_from, copied, merged, second_copies
from mplug_heal.save_times import FIRST, duration, mean_between
from mplug_saving.boxes import State
from mplug_saving.changes import changes_between
from mplug_saving.names import file_of
from mplug_saving.position import Position
from mplug_saving.rank_exchanges import from_rank

log = logging.getLogger("mplug")

KEPT = "heal"
"""The key of the generations in `Run.kept`."""
Key = tuple[int, int]
"""The step of a generation, and the attempt in which it was made."""


def saved_position(position: Any, section: str = "extensions.heal") -> Position:
    """A position whose parts can be copied. UsageError for that of another package than mplug-saving."""
    if not isinstance(position, Position):
        raise UsageError(f"{section}: the run is not saved by mplug-saving, whose parts are copied; install it")
    return position


@dataclass(frozen=True)
class Generation:
    """The state after a step: the parts of some of the `size` ranks that the run had, as far as a process has them."""

    key: Key
    size: int
    live: LiveState
    facts: Mapping[str, Any]
    parts: Mapping[int, State]


class Copying:
    """Copies the state of a run, every so many steps."""

    def __init__(self, every: int | Literal["auto"], hours: float | None) -> None:
        self._every, self._hours = every, hours
        self._next = 0
        self._since: tuple[int, float] | None = None
        self._parts: Callable[[], object] = lambda: None
        self._known: LiveState | None = None

    def reuse(self, position: Position, known: LiveState) -> None:
        """Use the index of copies from which the run goes on under the same layout: the ranks need not agree on it."""
        self._known, self._parts = known, weakref.ref(position.parts)

    def is_due(self, run: Run) -> bool:
        """Whether to copy after this step."""
        return run.step >= self._next

    def keep(self, run: Run, position: Position) -> None:
        """Copy the state after this step. Collective."""
        began = time.monotonic()
        older: list[Generation] = run.kept.get(KEPT, [])
        reused = {rank: parts for old in older[:-1] for rank, parts in old.parts.items() if old.size == _size(run)}
        run.kept[KEPT] = older[-1:]
        if self._parts() is not position.parts:  # the layout has changed while the run trains
            self._known, self._parts = None, weakref.ref(position.parts)
        live = capture(run, position, self._known)
        self._known = replace(live, own={})
        own = copied(live.own, reused.get(run.rank, {}))
        parts = {run.rank: own}
        if run.groups is not None:
            backed = next(rank for rank in range(_size(run)) if keeper(rank, _size(run)) == run.rank)
            parts[backed] = self._backed(run, position, live, backed, reused.get(backed, {}))
        if run.device.startswith("cuda"):
            torch.cuda.synchronize()
        run.largest(torch.zeros((), device=run.device))  # all ranks have their copies
        made = Generation((run.step, attempt()), _size(run), replace(live, own={}), position.facts(), parts)
        run.kept[KEPT] = [*older[-1:], made]
        self._schedule(run, time.monotonic() - began)

    def _backed(self, run: Run, position: Position, live: LiveState, rank: int, reused: State) -> State:
        """A second copy of what another rank owns."""
        return second_copies(run, position, live, [rank], {rank: reused})[rank]

    def _schedule(self, run: Run, stall: float) -> None:
        """Decide when the next copy is due, on rank 0 for all."""
        if self._every != "auto":
            self._next = run.step + self._every
            return
        now, steps = time.monotonic(), FIRST  # the first step of a process compiles, so the first interval is fixed
        if self._since is not None:
            step, began = self._since
            per_step = max(now - stall - began, 1e-6) / max(run.step - step, 1)
            mean = mean_between(run, self._hours)
            own = ceil(best_interval(stall, mean) / per_step) if run.rank == 0 else 0
            steps = max(int(run.summed(torch.tensor(float(own), dtype=torch.float64, device=run.device))), 1)
            if run.rank == 0:
                self._report(steps, steps * per_step, stall, mean)
        self._since, self._next = (run.step, now), run.step + steps

    def _report(self, steps: int, interval: float, stall: float, mean: float) -> None:
        log.info(
            "the state is copied again after %d steps (%s): a copy stops training for %s, and the run expects a death "
            "every %s; copies and repeated steps take %.2f%% of the time",
            steps,
            duration(interval),
            duration(stall),
            duration(mean),
            100 * lost_share(stall, interval, mean),
        )


def _size(run: Run) -> int:
    return run.mesh.world_size


def restore(run: Run, position: Position, copying: Copying) -> bool:
    """Continue after the last step whose copies the processes hold completely. Collective.

    False if they hold no complete generation; the run then begins as it would without copies. `copying` makes the next
    copies.
    """
    own = {one.key: one for one in run.kept.get(KEPT, [])}
    announced = run.gathered({key: (one.size, sorted(one.parts)) for key, one in own.items()})
    found = _newest_complete(announced)
    # `keep` drops the older of two generations: that must not be the one from which the run goes on
    run.kept[KEPT] = [one for key, one in own.items() if found is not None and key == found[0]]
    if found is None:
        if run.rank == 0 and any(announced):
            print("mplug: the processes do not hold the whole state of the run", file=sys.stderr, flush=True)
        return False
    key, holders = found
    first = next(rank for rank, held in enumerate(announced) if key in held)
    sent = (own[key].live, own[key].facts) if run.rank == first else None
    live, facts = from_rank(run, first, sent) or (None, None)
    assert live is not None
    assert facts is not None
    if holders.keys() == set(range(_size(run))) and facts["layout"] == run.config.parallel.layout:
        copying.reuse(position, live)
    parts = own[key].parts if key in own else {}
    nearest = {file_of(rank): run.rank if rank in parts else holder for rank, holder in holders.items()}
    live = replace(live, own=merged(parts.values()), holders=nearest)
    changes = changes_between(facts, run)
    continue_from(run, position, live, key[0], [*map(dict, facts["changes"])], changes)
    return True


def _newest_complete(announced: list[dict[Key, tuple[int, list[int]]]]) -> tuple[Key, dict[int, int]] | None:
    """The newest generation whose parts the ranks hold completely: its key, and a holder of each rank's part."""
    for key in sorted({key for held in announced for key in held}, reverse=True):
        size = next(held[key][0] for held in announced if key in held)
        holders = {part: rank for rank, held in enumerate(announced) if key in held for part in held[key][1]}
        if len(holders) == size:
            return key, holders
    return None
