"""The faults of a run, and the sentences that name them: a plan is a function of its number."""

import math
import random
import re
from collections.abc import Collection
from dataclasses import dataclass

LAYOUTS = ("dp4", "dp2tp2", "pp2dp2", "zero4", "cp2dp2", "dp6", "dp2tp2pp2", "fsdp4tp2")
OF_SAME_WORK = ("dp4", "dp2tp2", "zero4", "cp2dp2", "dp6", "fsdp4tp2")
"""Layouts whose ranks all do the same work, which a slow rank does slower."""
ENDING = ("nan", "weight", "gradient", "disk", "cut")
"""Kinds that end the run, which then resumes."""
SHARES = {"kill": 3, "stop": 3, "slow": 3, "clock": 3, "nan": 2, "weight": 2, "gradient": 2, "disk": 2, "file": 2}
KINDS = (*SHARES, "cut")
CUTS = 2
GAPS = (6, 8)
"""The least and the largest number of steps between two faults."""
LONGER = {"slow": 4, "disk": 4}
"""Additional steps after a slow rank, which several measurements name, and a full disk, which a save finds."""
STEPS = GAPS[1] * (sum(SHARES.values()) - SHARES["file"] + CUTS) + 4 * (SHARES["slow"] + SHARES["disk"]) + 14
"""The steps of an undisturbed run; others end after their last fault."""


@dataclass(frozen=True)
class Fault:
    """One fault: `number` is its place in its run, `at` the step at whose begin it strikes."""

    number: int
    kind: str
    rank: int
    at: int
    seed: int

    def expected(self, hosts: list[str]) -> str:
        """A regular expression for a sentence that names the fault, in a run whose ranks are on `hosts`."""
        hosts = [re.escape(host) for host in hosts]
        named = [rf"\branks? [\d, and]*\b{rank}\b[\d, and]* on {host}\b" for rank, host in enumerate(hosts)]
        own = rf"\brank {self.rank} on {hosts[self.rank]}\b"
        behind = [one for one, host in zip(named, hosts, strict=True) if host != hosts[0]]
        each_behind = "".join(f"(?=.*{one})" for one in behind)
        first = rf"rank 0( on {hosts[0]}\b.*)?"  # its machine is unknown before its first heartbeat
        alone = rf"^{own}((?!\branks? \d).)*"
        return {
            "kill": rf"{alone} (died (of SIGKILL|without an error message)|died or is unreachable|has died or ended)",
            "stop": rf"{alone} stopped (sending heartbeats|answering)",
            "slow": rf"{own} is a straggler: it computes",
            "nan": rf"transient fault of [^:]*{own}",
            "gradient": rf"transient fault of [^:]*{own}",
            "weight": rf"{own}.* (other|different) bits of the (master )?weight '",
            "cut": rf"^(?!.* on {hosts[0]}\b){each_behind}.*stopped sending|^{first} stopped answering",
            "disk": r"No space left on device|disk is full|no space",
            "file": r"step_\d+.*(damaged|does not match|is not what|checksum|differs|not valid|invalid)",
            "clock": rf"the clock of {own} jumped",
        }[self.kind]


@dataclass(frozen=True)
class Plan:
    """The faults of one run. A run on two machines has no launcher; others heal or restart."""

    number: int
    layout: str
    recovery: str
    """'heal' (spare processes), 'restarts', or 'machines' (two machines; the processes end and resume)."""
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        """The steps of the run."""
        return self.faults[-1].at + 10 if self.faults else STEPS

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(map(int, re.findall(r"\d+", self.layout)))


def plan(number: int, kinds: Collection[str], on_machines: bool) -> Plan:
    """The plan with a number. Layouts take turns, so that a few runs have all of them."""
    draw = random.Random(f"{number} {on_machines}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    recovery = "machines" if on_machines else draw.choice(("heal", "heal", "heal", "restarts"))
    shares = {kind: share for kind, share in {**SHARES, "cut": CUTS * on_machines}.items() if kind in kinds}
    if layout not in OF_SAME_WORK:
        shares.pop("slow", None)
    files = shares.pop("file", 0)
    drawn = [kind for kind, share in shares.items() for _ in range(share)]
    draw.shuffle(drawn)
    ends = [place for place, kind in enumerate(drawn) if kind in ENDING]
    after = set(draw.sample(ends, min(files, len(ends))))
    size, found, at = Plan(0, layout, "", ()).size, list[Fault](), 4
    for place, kind in enumerate(drawn):
        at += draw.randint(*GAPS)
        found.append(Fault(len(found), kind, draw.randrange(size), at, draw.randrange(10**6)))
        at += LONGER.get(kind, 0)
        if place in after:
            found.append(Fault(len(found), "file", 0, at, draw.randrange(10**6)))
    return Plan(number, layout, recovery, tuple(found))
