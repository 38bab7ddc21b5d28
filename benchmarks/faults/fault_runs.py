"""One run that receives the faults of a plan one after another, and what its sentences and its losses show.

The run starts as a user starts it (`mplug train`, or four to eight processes on two network namespaces, as under
another launcher). Whenever it ends, it resumes, until all steps are done or the time is over.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from fault_plans import ENDING, Fault, Plan
from machines import Machines
from warm import Forked

SECONDS = 30.0
"""Seconds within which a fault must be named."""
LONGEST = 90.0
"""Seconds without a step after which a run counts as lost."""
TAIL = 45.0
"""Seconds before the end of the time; faults of these count only if the run has shown what they do."""
EVERY = 4
OPTIONS = {
    "trainer.device": "cpu",
    "trainer.precision": "fp32",
    "trainer.seq_length": 32,
    "trainer.micro_batch_size": 1,
    "trainer.global_batch_size": 12,
    "trainer.eval_every": 0,
    "trainer.log_every": 100000,
    "schedule.name": "constant",
    "checkpoint.every": EVERY,
    "checkpoint.keep": 3,
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.vocab_size": 256,
    "data.name": "mock",
    "extensions.losspicture": "false",
    "extensions.watchdog.timeout": 5,
    "extensions.watchdog.first": 60,
    "extensions.watchdog.multiple": 3,
    "extensions.stragglers.every": 1,
    "extensions.stragglers.window": 6,  # steps are short: another program delays a rank in several of them
    "extensions.stragglers.below": 0.3,  # units of microseconds vary too; the fault is 30 ms in each
    "extensions.corruption.every": 1,
    "extensions.nanwatch.gradients": "true",
    "extensions.gc.every": 5,
}
HEALING = {"extensions.heal.spares": 2, "extensions.heal.fewer": "false", "extensions.heal.every": 3}
CONSEQUENCES = (
    r"the run continues after step \d+, from the copies in its processes|^continuing from step \d+$"
    r"|^rank 0( on [^;]*)? (has ended, and says why; its store at \S+ is closed|has died or ended:)"
)
"""Sentences that follow the one that names a fault."""


@dataclass
class Result:
    """What a fault shows."""

    plan: int
    layout: str
    recovery: str
    fault: Fault
    sentence: str = ""
    seconds: float | None = None
    lost: str = ""
    """What is lost, or an empty text."""

    @property
    def is_named(self) -> bool:
        """Whether a sentence names the fault in time."""
        return self.seconds is not None and self.seconds <= SECONDS

    @property
    def names_one(self) -> bool:
        """Whether the sentence names no other rank beside the right one."""
        return not re.search(r"\d+ on \S+ and rank \d+ on|no majority|straggler.*straggler", self.sentence)


@dataclass
class Line:
    """A sentence of the run, and when it came."""

    text: str
    when: float


@dataclass
class Shown:
    """What a run shows."""

    results: list[Result] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    """Sentences that name nothing that was injected, each once for a start of the run."""
    attempts: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    end: str = ""
    """'whole' if all steps are done, 'time' if the time was over before, 'stuck' if the run cannot go on."""


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step of the run."""
    path = folder / "runs" / "run" / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line, if the run was killed while it wrote
            rows.append(json.loads(line))
    return {row["step"]: row["loss"] for row in rows}


def prepare(folder: Path, faults: Sequence[Fault]) -> None:
    """The extension, where Python finds it, and its faults."""
    information = folder / "acme_injector-1.0.dist-info"
    information.mkdir()
    (folder / "struck").mkdir()
    shutil.copy(Path(__file__).with_name("injector.py"), folder / "acme_injector.py")
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-injector\nVersion: 1.0\nSummary: Faults\nRequires-Dist: mplug>=0.1\n"
    )
    (information / "entry_points.txt").write_text("[mplug.extensions]\ninjector = acme_injector:Injector\n")
    (folder / "faults.json").write_text(json.dumps([vars(one) for one in faults if one.kind != "file"]))


@contextmanager
def own_disk(folder: Path, size: str = "24m") -> Iterator[None]:
    """A file system of its own for the folder of runs, which a fault can fill."""
    runs = folder / "runs"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(runs)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)


def disk_refusal(folder: Path) -> str | None:
    """Why no file system can be mounted here, or None."""
    (folder / "runs").mkdir()
    try:
        with own_disk(folder):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error} {getattr(error, 'stderr', '')!r}"


class FaultyRun:
    """A run in a folder, with the faults of a plan, until a deadline (`time.monotonic`)."""

    def __init__(self, plan: Plan, folder: Path, deadline: float, machines: Machines | None = None) -> None:
        self.plan, self.folder, self.deadline, self.machines = plan, folder, deadline, machines
        half = plan.size // 2
        here = [socket.gethostname()] * plan.size
        self.hosts = here if machines is None else [machines[rank // half].name for rank in range(plan.size)]
        self.shown, self.found = Shown(), dict[int, Result]()
        self.when: dict[int, float] = {}

    def go(self) -> Shown:
        """Run until all steps are done, the time is over, or the run ends again and again without a fault."""
        idle = 0
        while time.monotonic() < self.deadline and len(losses(self.folder)) < self.plan.steps and idle < 3:
            before = len(self.found)
            self._attempt()
            idle = 0 if len(self.found) > before else idle + 1  # a run that ends without a fault has a defect
        self.shown.losses = losses(self.folder)
        whole = len(self.shown.losses) >= self.plan.steps
        self.shown.end = "whole" if whole else "time" if time.monotonic() >= self.deadline else "stuck"
        if self.shown.end == "time":
            self._drop_unfinished()
        self.shown.results = [self.found[number] for number in sorted(self.found)]
        return self.shown

    def _attempt(self) -> None:
        """Start the run, or resume it, and follow it until it ends."""
        self.shown.attempts += 1
        is_resumed = (self.folder / "runs" / "run" / "config.yaml").exists()
        damaged = self._damage() if is_resumed else None
        began = time.monotonic()
        processes = self._start(["--resume"] if is_resumed else [])
        lines, counts, struck = list[Line](), [0] * len(processes), self._struck()
        if damaged is not None:
            struck = {**struck, damaged.number: began}
        before, progress, seen = set(struck) - {damaged.number if damaged else -1}, time.monotonic(), 0
        while any(process.poll() is None for process in processes) or not counts:
            now = time.monotonic()
            self._read(processes, counts, lines, now)
            self._cut_if_asked(before)
            if (steps := len(losses(self.folder))) != seen or len(self._struck()) > len(before):
                seen, progress = steps, now if steps != seen else progress
            if now > self.deadline or now - progress > LONGEST:
                break
            time.sleep(0.05)
        self._end(processes)
        self._read(processes, counts, lines, time.monotonic())
        if self.machines is not None:
            self.machines.mend(1)
        with suppress(OSError):
            (self.folder / "runs" / "filler").unlink()
        struck |= self._struck()
        self._judge({number: when for number, when in struck.items() if number not in before}, lines)
        for process in processes:
            process.communicate()

    def _start(self, more: Sequence[str]) -> list[Forked]:
        plan, environment = self.plan, {**os.environ, "PYTHONPATH": str(self.folder)}
        options: dict[str, object] = {
            **OPTIONS,
            "trainer.steps": plan.steps,
            **(HEALING if plan.recovery == "heal" else {}),
        }
        if plan.faults:
            options["extensions.injector"] = "{}"
        settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        restarts = ["--restarts", "99"] if plan.recovery == "restarts" else []
        words = ["train", "--name", "run", "--parallel", plan.layout, *more, *restarts, *settings]
        if self.machines is None:
            return [Forked("mplug", *words, cwd=self.folder, environment=environment, session=True)]
        half, port, found = plan.size // 2, 29500 + self.shown.attempts, []
        for rank in range(plan.size):
            launcher = {"RANK": rank, "WORLD_SIZE": plan.size, "LOCAL_RANK": rank % half, "LOCAL_WORLD_SIZE": half}
            met = {"MASTER_ADDR": self.machines[0].address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
            of_rank = {name: str(value) for name, value in {**launcher, **met}.items()}
            pid = self.machines[rank // half].pid
            whole = {**environment, **of_rank}
            found.append(Forked("mplug", *words, cwd=self.folder, environment=whole, session=True, machine=pid))
        return found

    def _struck(self) -> dict[int, float]:
        """When each fault struck."""
        files = [path for path in (self.folder / "struck").iterdir() if path.name.isdigit()]
        return {int(path.name): float(path.read_text().split()[1]) for path in files}

    def _read(self, processes: Sequence[Forked], counts: list[int], lines: list[Line], now: float) -> None:
        """Add the new sentences of all processes."""
        for place, process in enumerate(processes):
            path = Path(process.output).with_name("err")
            text = path.read_text(errors="replace") if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            new = whole[counts[place] :].splitlines()
            counts[place] = len(whole)
            lines += [Line(line.removeprefix("mplug: "), now) for line in new if line.startswith("mplug: ")]

    def _cut_if_asked(self, before: set[int]) -> None:
        if self.machines is not None and any(
            self.plan.faults[number].kind == "cut" for number in self._struck().keys() - before
        ):
            self.machines.cut(1)

    def _damage(self) -> Fault | None:
        """Flip a bit of a file of the newest checkpoint, if the plan has it before the run resumes."""
        struck = self._struck()
        for fault in self.plan.faults:
            if fault.kind == "file" and fault.number not in struck and fault.number - 1 in struck:
                folders = sorted((self.folder / "runs" / "run" / "checkpoints").glob("step_*"))
                if len(folders) < 2:
                    return None
                files = sorted(path for path in folders[-1].rglob("*") if path.is_file() and path.stat().st_size)
                path = files[fault.seed % len(files)]
                data = bytearray(path.read_bytes())
                data[fault.seed % len(data)] ^= 1 << fault.seed % 8
                path.write_bytes(data)
                (self.folder / "struck" / str(fault.number)).write_text(f"0 {time.monotonic()}")
                return fault
        return None

    def _end(self, processes: Sequence[Forked]) -> None:
        """Kill what still runs in the folder: processes that were stopped, and those of a run that is given up."""
        for process in processes:
            process.kill()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if os.readlink(entry / "cwd") == str(self.folder):
                        os.kill(int(entry.name), signal.SIGKILL)

    def _judge(self, struck: Mapping[int, float], lines: Sequence[Line]) -> None:
        """Find the sentence of each fault of an attempt; what remains is false."""
        used = set[int]()
        for number, when in sorted(struck.items(), key=lambda one: one[1]):
            fault = self.plan.faults[number]
            self.when[number] = when
            result = Result(self.plan.number, self.plan.layout, self.plan.recovery, fault)
            for place, line in enumerate(lines):
                if place not in used and line.when >= when and re.search(fault.expected(self.hosts), line.text):
                    result.sentence, result.seconds = line.text, line.when - when
                    used.add(place)
                    break
            self.found[number] = result
        patterns = [CONSEQUENCES, *(self.plan.faults[number].expected(self.hosts) for number in struck)]
        others = [
            line.text
            for place, line in enumerate(lines)
            if place not in used and not any(re.search(pattern, line.text) for pattern in patterns)
        ]
        self.shown.false += dict.fromkeys(others)  # every process prints the error that ends them all
        last = next((self.found[number] for number in reversed(struck) if not self.found[number].sentence), None)
        if last is not None and others and last.fault.kind in (*ENDING, "kill", "stop"):
            last.sentence = f"(not named) {others[-1]}"

    def _drop_unfinished(self) -> None:
        """Leave out the faults after which the time was over before the run had shown a sentence and two steps."""
        found = self.shown.losses
        for number, one in sorted(self.found.items(), reverse=True):
            has_gone_on = all(step in found for step in range(1, one.fault.at + 2))
            if (one.is_named and has_gone_on) or self.when[number] < self.deadline - TAIL:
                return
            del self.found[number]


def compare(shown: Shown, steps: int, whole: Mapping[int, float]) -> None:
    """Compare the losses of a run of `steps` with those of an undisturbed one, of the same layout.

    The first step that has another loss, or is missing, is charged to the last fault before it, and to all after it.
    """
    results = shown.results
    last = max((one.fault.at for one in results), default=0) + 1 if shown.end == "time" else steps
    bad = next((step for step in range(1, last + 1) if shown.losses.get(step) != whole[step]), None)
    if bad is None:
        return
    found = shown.losses.get(bad)
    what = "is missing" if found is None else f"has the loss {found} instead of {whole[bad]}"
    charged = max((one.fault.at for one in results if one.fault.at <= bad), default=0)
    for one in results:
        if one.fault.at >= charged:
            one.lost = f"step {bad} {what}{' (the run cannot go on)' if shown.end == 'stuck' else ''}"


def run_plan(plan: Plan, folder: Path, deadline: float, has_disk: bool) -> Shown:
    """Run a plan in an empty folder; with `has_disk`, the runs have a file system of their own."""
    folder = folder.resolve()
    (folder / "runs").mkdir()
    prepare(folder, plan.faults)
    two: AbstractContextManager[Machines | None] = Machines(2) if plan.recovery == "machines" else nullcontext()
    with own_disk(folder) if has_disk else nullcontext(), two as machines:
        run = FaultyRun(plan, folder, deadline, machines)
        try:
            return run.go()
        finally:
            run._end([])
