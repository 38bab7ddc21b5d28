"""Which fragment is exchanged at which step, and which parameters it has: pure functions, alike on all ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mplug import Placement, Plan


@dataclass(frozen=True)
class Rounds:
    """Fragment f of F is exchanged at the steps (f + 1) H / F + k H (Streaming DiLoCo, arXiv 2501.18512, section 2.3).

    `every` is H, and `last` the last step of the run: there all fragments are exchanged without a delay, so that the
    global weights contain all that the workers have learned.
    """

    every: int
    fragments: int
    delay: int
    last: int

    def begins(self, step: int) -> tuple[int, ...]:
        """The fragments whose exchange begins after the inner step `step`."""
        if step == self.last:
            return tuple(range(self.fragments))
        distance = self.every // self.fragments
        return () if step % distance or step < 1 else ((step // distance - 1) % self.fragments,)

    def merges(self, step: int) -> tuple[int, ...]:
        """The fragments under way that local weights receive after the inner step `step`, before any exchange begins.

        With a delay of 0, the local weights receive a fragment at the step at which its exchange begins.
        """
        if self.delay == 0:
            return ()
        if step < self.last:
            return self.begins(step - self.delay)
        return tuple(f for one in range(max(step - self.delay, 1), step) for f in self.begins(one))


def fragments_of(plan: Plan, placements: Mapping[str, Placement], number: int) -> dict[str, int]:
    """The fragment of each trained parameter of the whole model: unit u is in fragment u mod F (strided).

    A parameter that several units share belongs to the first of them. A parameter of no unit is in fragment 0.
    """
    units = [f"{unit.name}." for unit in plan.units]
    return {
        name: _first(name.startswith(unit) for unit in units) % number
        for name, placement in placements.items()
        if placement.parameter.trainable
    }


def _first(found: Iterable[bool]) -> int:
    return next((number for number, is_found in enumerate(found) if is_found), 0)
