"""Faults in runs of 4 to 8 processes: whether one sentence names them within 30 s, and whether anything is lost.

    python benchmarks/faults/injected.py --count 60 [--first 0] [--seconds 1200] [--jobs 4] [--kinds kill stop]
                                         [--out results.jsonl]
    python benchmarks/faults/injected.py --table results.jsonl ...

A case is a function of its number: a kind of fault, a layout, a rank, a step and a seed. The run starts as a user
starts it (`mplug train`; for cut links four processes on two network namespaces, as under another launcher). The case
is judged by what the command prints, and then the run resumes without the fault: every step must have the loss of an
undisturbed run. It prints a row for each case, and a table by kind at the end. `--jobs` cases run at a time; no case
begins after `--seconds`. With `--out`, each case appends a line of JSON to a file, of which `--table` makes the table.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from machines import Machines, unavailable
from warm import Forked

SECONDS = 30.0
"""Seconds within which a fault must be named."""
STEPS, EVERY = 16, 4
LAYOUTS = ("dp4", "dp2tp2", "pp2dp2", "zero4", "cp2dp2", "dp6", "dp2tp2pp2", "fsdp4tp2")
OF_FOUR = ("dp4", "dp2tp2", "pp2dp2", "zero4", "cp2dp2")
"""Layouts whose four processes can be two on each of two machines."""
SPREAD = ("dp4", "dp2tp2", "zero4", "dp6")
"""Layouts whose ranks all do the same work, which a slow rank does slower."""
KINDS = ("kill", "stop", "slow", "nan", "weight", "gradient", "cut", "disk", "file", "clock")
OPTIONS = {
    "trainer.device": "cpu",
    "trainer.precision": "fp32",
    "trainer.steps": STEPS,
    "trainer.seq_length": 32,
    "trainer.micro_batch_size": 1,
    "trainer.global_batch_size": 12,
    "trainer.eval_every": 0,
    "trainer.log_every": 1000,
    "schedule.name": "constant",
    "checkpoint.every": EVERY,
    "checkpoint.keep": 9,
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.vocab_size": 256,
    "data.name": "mock",
    "extensions.losspicture": "false",
    "extensions.watchdog.timeout": 5,
    "extensions.watchdog.first": 60,
    "extensions.watchdog.multiple": 3,
    "extensions.stragglers.every": 1,
    "extensions.stragglers.below": 0.3,  # units of microseconds vary on a busy machine; the fault is 50 ms in each
    "extensions.corruption.every": 1,
    "extensions.nanwatch.gradients": "true",
    "extensions.gc.every": 5,
}


@dataclass(frozen=True)
class Case:
    """One fault."""

    number: int
    kind: str
    layout: str
    rank: int
    at: int
    seed: int

    @classmethod
    def of(cls, number: int, kinds: Sequence[str] = KINDS) -> "Case":
        """The case with a number; kinds take turns."""
        draw, kind = random.Random(number), kinds[number % len(kinds)]
        layout = draw.choice({"slow": SPREAD, "cut": OF_FOUR}.get(kind, LAYOUTS))
        rank, at = draw.randrange(size_of(layout)), draw.randint(6, 10)
        return cls(number, kind, layout, rank, at, draw.randrange(10**6))

    @property
    def expected(self) -> str:
        """A regular expression for a sentence that names the fault."""
        rank = rf"\brank {self.rank}\b|\branks [\d, and]*\b{self.rank}\b"
        return {
            "kill": rf"({rank}).*(SIGKILL|killed|died|lost)",
            "stop": rf"({rank}).*stopped sending heartbeats",
            "slow": rf"({rank}) on \S+ is a straggler: it computes",
            "nan": rf"transient fault of [^:]*\b{rank}",
            "weight": rf"({rank}).* of the weight '",
            "gradient": rf"transient fault of [^:]*\b{rank}",
            "cut": r"(ranks? 2( on \S+, last seen in step \d+,)? and (rank )?3|rank 0) .*"
            r"(heartbeats|unreachable|answering)",
            "disk": r"(No space left on device|disk is full).*|.*(no space|full)",
            "file": r"step_\d+.*(damaged|does not match|is not what|checksum|differs|not valid|invalid)",
        }.get(self.kind, "")


@dataclass
class Result:
    """What a case shows."""

    case: Case
    sentence: str
    seconds: float | None
    is_named: bool
    lost: str
    """What is lost, or an empty text."""


def size_of(layout: str) -> int:
    """The number of processes of a layout."""
    return math.prod(map(int, re.findall(r"\d+", layout)))


def prepare(folder: Path) -> None:
    """The extension, where Python finds it."""
    information = folder / "acme_injector-1.0.dist-info"
    information.mkdir()
    shutil.copy(Path(__file__).with_name("injector.py"), folder / "acme_injector.py")
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-injector\nVersion: 1.0\nSummary: Faults\nRequires-Dist: mplug>=0.1\n"
    )
    (information / "entry_points.txt").write_text("[mplug.extensions]\ninjector = acme_injector:Injector\n")


def words(layout: str, more: Mapping[str, object]) -> list[str]:
    """The command of a run."""
    options = {**OPTIONS, **more}
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    return ["train", "--name", "run", "--parallel", layout, *settings]


def start(folder: Path, line: Sequence[str], machines: Machines | None = None) -> list[Forked]:
    """Start the command, or its four processes on two machines."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if machines is None:
        return [Forked("mplug", *line, cwd=folder, environment=environment, session=True)]
    found = []
    for rank in range(4):
        launcher = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        met = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        pid = machines[rank // 2].pid
        whole = {**environment, **launcher, **met}
        found.append(Forked("mplug", *line, cwd=folder, environment=whole, session=True, machine=pid))
    return found


def errors_of(process: Forked) -> str:
    """What a process has written to standard error so far."""
    path = Path(process.output).with_name("err")
    return path.read_text(errors="replace") if path.exists() else ""


def follow(
    processes: Sequence[Forked], pattern: str, folder: Path, limit: float
) -> tuple[str, float | None, list[int]]:
    """Wait until all have ended: (the first line that matches, when it came after the fault, exit statuses)."""
    deadline, found, at, when = time.monotonic() + limit, "", None, None
    while time.monotonic() < deadline:
        has_ended = all(process.poll() is not None for process in processes)
        if when is None and (folder / "struck").exists():
            when = float((folder / "struck").read_text().split()[1])
        if not found:
            lines = [
                line for process in processes for line in errors_of(process).splitlines() if line.startswith("mplug: ")
            ]
            found = next((line for line in lines if pattern and re.search(pattern, line)), "")
            at = time.monotonic() if found else None
            if has_ended and not found and lines:
                found, at = f"(not named) {lines[-1]}", None
        if has_ended:
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
    seconds = at - when if at is not None and when is not None else None
    return found, seconds, [process.returncode or 0 for process in processes]


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step of the run."""
    path = folder / "runs" / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows}


def lost(folder: Path, whole: Mapping[int, float]) -> str:
    """What differs from the undisturbed run."""
    found = losses(folder)
    missing = [step for step in whole if step not in found]
    other = [
        step for step in whole if step in found and abs((found[step] or 0) - whole[step]) > 1e-5 * abs(whole[step])
    ]
    return f"steps {missing} are missing" if missing else f"steps {other} have other losses" if other else ""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size in the place of the folder of runs, for the block; its files are kept at the end."""
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(runs)], check=True, capture_output=True)
    try:
        yield
    finally:
        shutil.copytree(runs, folder / "kept", symlinks=True, dirs_exist_ok=True)
        subprocess.run(["umount", str(runs)], check=True)
        runs.rmdir()
        (folder / "kept").rename(runs)


def damage(folder: Path, seed: int) -> None:
    """Flip a bit of a file of the newest checkpoint."""
    newest = max((folder / "runs" / "run" / "checkpoints").glob("step_*"))
    files = sorted(path for path in newest.rglob("*.safetensors") if path.stat().st_size)
    path = files[seed % len(files)]
    data = bytearray(path.read_bytes())
    data[-1 - seed % 100] ^= 1 << seed % 8
    path.write_bytes(data)


def judged(case: Case, whole: Mapping[int, float], folder: Path) -> Result:
    """Run a case, judge its sentence, and resume it."""
    fault = {f"extensions.injector.{name}": getattr(case, name) for name in ("kind", "rank", "at", "seed")}
    more: dict[str, object] = {} if case.kind in ("disk", "file") else dict(fault)
    if case.kind == "file":
        more["trainer.steps"] = 2 * EVERY + 1  # two checkpoints; the newer one is damaged
    machines = Machines(2) if case.kind == "cut" else nullcontext()
    size = small_disk(folder, "1500k") if case.kind == "disk" else nullcontext()
    with machines as two, size:
        began = time.monotonic()
        processes = start(folder, words(case.layout, more), two)
        if case.kind == "cut":
            while not (folder / "struck").exists() and time.monotonic() < began + 120:
                time.sleep(0.05)
            two.cut(1)
        sentence, seconds, statuses = follow(processes, case.expected, folder, 150)
        if case.kind == "cut":
            two.mend(1)
    if case.kind == "file":
        damage(folder, case.seed)
    resumes = case.kind not in ("slow", "clock")
    if resumes:
        line = words(case.layout, {"extensions.injector": "false"} if more.keys() & fault.keys() else {})
        began = time.monotonic()
        resumed = start(folder, [line[0], "--resume", *line[1:]])
        text, _, statuses = follow(resumed, case.expected if case.kind == "file" else "", folder, 150)
        if case.kind == "file":
            sentence, seconds = text, time.monotonic() - began
    is_named = bool(sentence) and not sentence.startswith("(not named)") and (seconds is None or seconds <= SECONDS)
    if case.kind == "clock":  # nothing is to be named: the run must not notice
        is_named, sentence = not sentence, sentence or "(the run continues)"
    problem = lost(folder, whole) or ("" if statuses == [0] * len(statuses) else f"exit status {statuses}")
    return Result(case, sentence.removeprefix("mplug: "), seconds, is_named, problem)


def undisturbed(layout: str) -> dict[int, float]:
    """The losses of a run without a fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        _, _, statuses = follow(start(folder, words(layout, {})), "", folder, 150)
        found = losses(folder)
        assert statuses == [0], statuses
        assert len(found) == STEPS, found
        return found


def table(results: Sequence[Result]) -> str:
    """A row for each kind."""
    lines = ["| fault | runs | named right within 30 s | median s | nothing lost |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(one.case.kind for one in results):
        own = [one for one in results if one.case.kind == kind]
        times = sorted(one.seconds for one in own if one.seconds is not None and one.is_named)
        middle = f"{times[len(times) // 2]:.1f}" if times else "-"
        named, kept = sum(one.is_named for one in own), sum(not one.lost for one in own)
        lines.append(f"| {kind} | {len(own)} | {named} | {middle} | {kept} |")
    named, kept = sum(one.is_named for one in results), sum(not one.lost for one in results)
    return "\n".join([*lines, f"| all | {len(results)} | {named} | | {kept} |"])


def tried(number: int, kinds: tuple[str, ...], whole: Mapping[str, dict[int, float]]) -> Result | str:
    """The result of a case, or why it is not possible here."""
    case = Case.of(number, kinds)
    reason = unavailable() if case.kind == "cut" else None
    if reason is not None:
        return f"case {number}: no network namespaces here: {reason}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepare(folder)
        try:
            return judged(case, whole[case.layout], folder)
        except subprocess.CalledProcessError as error:
            return f"case {number}: {case.kind} is not possible here: {error}: {error.stderr!r}"
        finally:
            with suppress(OSError, ValueError):
                os.kill(int((folder / "struck").read_text().split()[0]), 9)


def row_of(one: Result) -> str:
    """The row of a case."""
    verdict = "named" if one.is_named else "NOT NAMED"
    when = "-" if one.seconds is None else f"{one.seconds:.1f} s"
    kept = f"LOST: {one.lost}" if one.lost else "nothing lost"
    case = one.case
    place = f"{case.number} {case.kind} {case.layout} rank {case.rank} step {case.at}"
    return f"{place}: {verdict}, {when}, {kept}: {one.sentence[:300]}"


def read_results(paths: Sequence[Path]) -> list[Result]:
    """The results in files of `--out`; of a case that was run again, the last one."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    results = [Result(**{**line, "case": Case(**line["case"])}) for line in lines]
    return list({(one.case.number, one.case.kind): one for one in results}.values())


def run_cases(options: argparse.Namespace) -> list[Result]:
    """Run cases until the time is over, each in a process of its own that starts the processes of the run."""
    end, kinds = time.monotonic() + options.seconds, tuple(options.kinds)
    numbers = range(options.first, options.first + options.count)
    results, left = list[Result](), iter(numbers)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        layouts = list(dict.fromkeys(Case.of(number, kinds).layout for number in numbers))
        whole = dict(zip(layouts, pool.map(undisturbed, layouts), strict=True))
        under_way: set[Future[Result | str]] = set()
        while True:
            while len(under_way) < options.jobs and time.monotonic() < end and (number := next(left, None)) is not None:
                under_way.add(pool.submit(tried, number, kinds, whole))
            if not under_way:
                return results
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for found in (one.result() for one in done):
                print(found if isinstance(found, str) else row_of(found), flush=True)
                if isinstance(found, Result):
                    results.append(found)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(asdict(found)) + "\n")


def main() -> None:
    """Run the cases until the time is over, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    options = parser.parse_args()
    results = read_results(options.table) if options.table else run_cases(options)
    print(table(sorted(results, key=lambda one: KINDS.index(one.case.kind))))


if __name__ == "__main__":
    main()
