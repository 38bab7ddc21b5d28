"""Stopped workers, stuck main threads and cut links: which rank a run names, and how many seconds after its time-out.

    python benchmarks/hangs.py             all cases, as a Markdown table
    python benchmarks/hangs.py 3 12        some of them

Each case is a run of four processes: on one machine, where `mplug train` starts them, or on two machines (network
namespaces, tests/support/machines.py), where each process gets the variables that a launcher sets. An extension brings
the misfortune about in the middle of an activity. The time-out is a few seconds, so that the table takes minutes.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from machines import Machine, Machines, unavailable
from warm import Forked

TIMEOUT, FIRST = 5.0, 30.0
PATIENCE = 300.0
"""Seconds until a case has failed."""

PLUGIN = """
import os, signal, sys, time
from pathlib import Path
from pydantic import BaseModel, ConfigDict, Field
from mplug import Activity, hookimpl

class Misfortune:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        rank: int = Field(description="the rank that it meets")
        kind: str = Field(description="what happens")
        activity: str = Field(description="when it happens")

    def __init__(self, config):
        self.config, self.run, self.began, self.done = config, None, None, False

    def strike(self, run, activity):
        # Not before the run is under way: each activity then has a known duration.
        config = self.config
        if run.rank != config.rank or activity != config.activity or self.done:
            return
        if activity != "building" and (run.step < 9 or time.monotonic() < self.began + 3):
            return
        self.done = True
        Path("struck.partial").write_text(f"{os.getpid()} {time.monotonic()}")
        os.rename("struck.partial", "struck")
        if config.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif config.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif config.kind == "stuck":
            self.wait_for_ever()
        else:  # the cable is pulled meanwhile
            time.sleep(2)

    def wait_for_ever(self):
        while True:
            time.sleep(1000)

    @hookimpl
    def offer(self, run, model):
        self.run = run
        self.strike(run, "building")

    @hookimpl
    def step_started(self, run):
        if self.began is None:
            self.began = time.monotonic()
            self.in_loader(run)
        self.strike(run, "step")

    def in_loader(self, run):
        from mplug.training import feed
        def reading(loader, samples):
            self.strike(run, "loader")
            yield from loader.take(samples)
        feed.Feed.take = lambda feeding, samples: feeding._batches(
            reading(feeding.loader, samples), samples // feeding._shards
        )

    @hookimpl
    def activity_began(self, run):
        if run.activity.name == Activity.EVALUATION:
            self.strike(run, "evaluation")

    @hookimpl
    def state(self, run):
        return {"misfortune": self}

    def state_dict(self):
        self.strike(self.run, "saving")
        return {}

    def load_state_dict(self, state):
        pass
"""

OPTIONS = {
    "trainer.device": "cpu",
    "trainer.precision": "fp32",
    "trainer.steps": "100000",
    "trainer.seq_length": "32",
    "trainer.micro_batch_size": "1",
    "trainer.global_batch_size": "4",
    "trainer.eval_every": "4",
    "trainer.eval_samples": "4",
    "trainer.log_every": "100000",
    "checkpoint.every": "5",
    "model.num_layers": "4",
    "model.hidden_size": "32",
    "model.num_attention_heads": "2",
    "model.vocab_size": "256",
    "data.path": "text.txt",
    "extensions.watchdog.timeout": str(TIMEOUT),
    "extensions.watchdog.first": str(FIRST),
    "extensions.watchdog.multiple": "3",
}


@dataclass(frozen=True)
class Case:
    """Rank `rank` of a layout meets a misfortune in an activity."""

    machines: int
    layout: str
    kind: str
    rank: int
    activity: str


CASES = [
    Case(1, "dp4", "stopped", 2, "step"),
    Case(1, "dp4", "stopped", 0, "step"),
    Case(1, "dp4", "stopped", 1, "building"),
    Case(1, "dp4", "stopped", 3, "evaluation"),
    Case(1, "dp4", "stuck", 1, "loader"),
    Case(1, "tp2pp2", "stopped", 1, "step"),
    Case(1, "tp2pp2", "stuck", 3, "step"),
    Case(1, "tp2pp2", "stuck", 0, "saving"),
    Case(1, "fsdp4", "stopped", 2, "saving"),
    Case(1, "zero4", "stuck", 2, "evaluation"),
    Case(2, "dp4", "stopped", 2, "step"),
    Case(2, "dp4", "stopped", 0, "step"),
    Case(2, "dp4", "stopped", 1, "evaluation"),
    Case(2, "dp4", "stuck", 2, "loader"),
    Case(2, "tp2pp2", "stopped", 3, "saving"),
    Case(2, "tp2pp2", "stuck", 1, "step"),
    Case(2, "fsdp4", "stopped", 1, "building"),
    Case(2, "zero4", "stuck", 0, "saving"),
    Case(2, "dp4", "killed", 2, "step"),
    Case(2, "dp4", "cut", 2, "step"),
    Case(2, "tp2pp2", "cut", 2, "evaluation"),
    Case(2, "fsdp4", "cut", 2, "saving"),
]
"""`cut`: the cable of the second machine, which has the ranks 2 and 3."""


@dataclass
class Process:
    """A process that the script started: when its first sentence came, and its exit status."""

    popen: Forked
    sentence: str = ""
    at: float = 0.0

    @property
    def errors(self) -> Path:
        """The file to which the process writes its errors."""
        return Path(self.popen.output).with_name("err")

    def read_sentence(self) -> None:
        """Read the first error sentence of the process, if it has printed one."""
        if not self.sentence and self.errors.exists():
            lines = [line for line in self.errors.read_text().splitlines() if line.startswith("mplug: ")]
            if lines:
                self.sentence, self.at = lines[0].removeprefix("mplug: "), time.monotonic()


def prepare(folder: Path) -> None:
    """A text, and the extension where Python finds it."""
    (folder / "text.txt").write_text("".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26)))
    information = folder / "acme_misfortune-1.0.dist-info"
    information.mkdir()
    (folder / "acme_misfortune.py").write_text(PLUGIN)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-misfortune\nVersion: 1.0\nSummary: Faults\nRequires-Dist: mplug>=0.1\n"
    )
    (information / "entry_points.txt").write_text("[mplug.extensions]\nmisfortune = acme_misfortune:Misfortune\n")


def words(case: Case) -> list[str]:
    """The command of every process."""
    fields = {f"extensions.misfortune.{name}": str(getattr(case, name)) for name in ("rank", "kind", "activity")}
    options = [word for name, value in {**OPTIONS, **fields}.items() for word in ("--set", f"{name}={value}")]
    return ["train", "--name", "run", "--parallel", case.layout, *options]


def begin(case: Case, folder: Path, machines: list[Machine]) -> Iterator[Process]:
    """Start the processes of a case: forks of a process that has torch imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    if not machines:
        yield Process(Forked("mplug", *words(case), cwd=folder, environment=environment, session=True))
        return
    for rank in range(4):
        machine = machines[rank // 2]
        launcher = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        met = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        whole = {**environment, **launcher, **met}
        yield Process(Forked("mplug", *words(case), cwd=folder, environment=whole, session=True, machine=machine.pid))


def struck(folder: Path, processes: list[Process]) -> tuple[int, float]:
    """The process id of the rank that met the misfortune, and the time."""
    deadline = time.monotonic() + PATIENCE
    while not (folder / "struck").exists():
        ended = [process.errors.read_text() for process in processes if process.popen.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, "nothing has happened to the run"
        time.sleep(0.02)
    pid, when = (folder / "struck").read_text().split()
    return int(pid), float(when)


def measured(case: Case, folder: Path, machines: Machines | None) -> list[str]:
    """The rows of a case: each sentence, the ranks that print it, and the time."""
    processes = list(begin(case, folder, list(machines or ())))
    pid, when = struck(folder, processes)
    if case.kind == "cut":
        assert machines is not None
        machines.cut(1)
        when = time.monotonic()
    try:
        deadline = time.monotonic() + PATIENCE
        lost_rank = case.rank if machines is not None and case.kind in ("stopped", "killed") else None
        while time.monotonic() < deadline:
            for process in processes:
                process.read_sentence()
            if all(process.popen.poll() is not None for process in processes):
                break
            time.sleep(0.02)
        for process in processes:
            process.read_sentence()
    finally:
        if machines is not None:
            machines.mend(1)
        for process in processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.sentence = process.sentence or "DOES NOT END"
            process.popen.communicate()
    alive = "alive" if running(pid) else "dead"
    by_sentence: dict[str, list[tuple[int, Process]]] = {}
    for rank, process in enumerate(processes):
        if rank != lost_rank:
            by_sentence.setdefault(process.sentence or "(nothing)", []).append((rank, process))
    rows = []
    for sentence, reporters in by_sentence.items():
        late = max(process.at for _, process in reporters) - when
        names = "the launcher" if machines is None else f"ranks {', '.join(str(rank) for rank, _ in reporters)}"
        status = sorted({process.popen.returncode for _, process in reporters})
        reported_by = f"{names} (status {', '.join(map(str, status))})"
        times = f"{late:.1f} | {late - TIMEOUT:+.1f}" if all(process.at for _, process in reporters) else "- | -"
        rows.append(f"{times} | {reported_by} | {alive} | {sentence} |")
    return rows


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    """Run the cases that the command line numbers, or all."""
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(CASES) + 1)
    reason = unavailable()
    titles = (
        "",
        "machines",
        "layout",
        "misfortune",
        "s",
        "s after the time-out",
        "reported by",
        "the process",
        "sentence",
    )
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for number in numbers:
        case = CASES[number - 1]
        subject = "link of ranks 2, 3" if case.kind == "cut" else f"rank {case.rank}"
        misfortune = f"{subject} {case.kind} in {case.activity}"
        first = f"| {number} | {case.machines} | {case.layout} | {misfortune} | "
        if case.machines == 2 and reason is not None:
            print(f"{first} skipped: {reason} |")
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder)
            if case.machines == 2:
                with Machines(2) as machines:
                    rows = measured(case, folder, machines)
            else:
                rows = measured(case, folder, None)
            with suppress(OSError, ValueError):
                os.kill(int((folder / "struck").read_text().split()[0]), signal.SIGKILL)
        for row in rows:
            print(f"{first}{row}", flush=True)


if __name__ == "__main__":
    main()
