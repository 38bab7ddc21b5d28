"""Runs of several processes: who starts them, what ends them, and what they leave behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from machines import Machines
from torch import Tensor
from warm import Forked

from mplug.checkpoint.names import path_of
from mplug.distributed.launch import TERMINATED, Handler, Pipes
from mplug.training.interrupt import STOPPING
from mplug_testing.harness import EXACT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

SHAPE = {
    "model.num_layers": 4,
    "model.num_attention_heads": 4,
    "model.dropout": 0.1,
    "schedule.warmup_steps": 3,
    "schedule.decay_steps": 20,
    "trainer.steps": 20,
    "checkpoint.every": 5,
    "checkpoint.keep": 2,
    "data.path": "text.txt",
}
MPLUG = ("-m", "mplug")
BEGUN: list["Command"] = []
PATIENCE = 900.0
"""Seconds until what waits is taken to wait for ever; a busy machine needs many more than a quiet one."""


# Commands and their processes.


@dataclass
class Command:
    """A command that runs, and where it writes, by which its processes and their children are known."""

    process: subprocess.Popen[str] | Forked
    output: str

    def pids(self) -> list[int]:
        """Its living processes and their children: those that write where it does."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "fd" / "1") == self.output:
                    found.append(int(folder.name))
        return found

    def worker(self, rank: int) -> int | None:
        """The process that writes the log of a rank."""
        for pid in self.pids():
            with suppress(OSError):
                opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                if any(path.endswith(f"/logs/rank{rank}.log") for path in opened):
                    return pid
        return None

    def ended(self) -> subprocess.CompletedProcess[str]:
        """What it printed, once it has ended."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def kill_what_is_left(self) -> None:
        """After a test that failed: its processes are not the next test's business."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.communicate()

    def assert_nothing_is_left(self) -> None:
        """None of its processes outlives it."""
        poll(lambda: not self.pids(), "its processes have ended")


def poll(condition: Callable[[], Any], what: str) -> Any:
    """The condition's value as soon as it is true; AssertionError at the deadline."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)
    return value


def begin(folder: Path, *words: str, machine: int | None = None, **environment: str) -> Command:
    """Start a command in a folder and in a session of its own: a module in a fork, others in an interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    if words[0] != "-m":
        return begin_anew(folder, *words, **environment)
    process = Forked(*words[1:], cwd=folder, environment=environment, session=True, machine=machine)
    BEGUN.append(Command(process, process.output))
    return BEGUN[-1]


def begin_anew(folder: Path, *words: str, **environment: str) -> Command:
    """The same in an interpreter that has imported nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    program = () if words[0] == "mpirun" else (sys.executable,)
    process = subprocess.Popen(
        [*program, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    BEGUN.append(Command(process, os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")))
    return BEGUN[-1]


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    while BEGUN:
        BEGUN.pop().kill_what_is_left()


def free_port() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# Runs.


@pytest.fixture(scope="module")
def options(tiny: list[str]) -> list[str]:
    """A run that every layout of up to four ranks can do; in fp64, so that a wrong sum is told from rounding."""
    fields = {**SHAPE, "trainer.precision": "fp64"}
    return [*tiny, *(word for name, value in fields.items() for word in ("--set", f"{name}={value}"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, in which the runs of this file are kept."""
    path = tmp_path_factory.mktemp("launch")
    (path / "text.txt").write_text("".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26)))
    return path


Whole = Callable[[str], Path]
Logical = Callable[[Path], dict[str, Tensor]]
Same = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def whole(folder: Path, options: list[str]) -> Whole:
    """The directory of an undisturbed run of a layout ('' is one process): each is done once, by `mplug train`."""
    done: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in done:
            name = f"whole-{layout or 'one'}"
            command = begin(folder, *MPLUG, "train", "--name", name, "--parallel", layout, *options)
            result = command.ended()
            assert result.returncode == 0, result.stderr
            assert "Traceback" not in result.stderr
            command.assert_nothing_is_left()
            done[layout] = folder / "runs" / name
        return done[layout]

    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(run: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")) for line in metrics(run)]


def assert_same_losses(run: Path, reference: Path) -> None:
    """Every step of the reference once, with its loss and gradient norm to rounding."""
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(reference)]
    for name in ("loss", "grad_norm"):
        found, wanted = ([line[name] for line in metrics(path)] for path in (run, reference))
        assert found == pytest.approx(wanted, rel=EXACT), name


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def saved_at(run: Path, step: int) -> Path:
    return path_of(run / "checkpoints", step)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal logical tensors: each differs by at most 1e-9 of its norm."""
    assert found.keys() == wanted.keys()
    off = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    assert {name: error for name, error in off.items() if not error <= 1e-9} == {}


def assert_one_sentence(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """The exit status, and one line on stderr that has all these words."""
    assert result.returncode == status, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("mplug: ")
    assert [word for word in words if word not in result.stderr] == [], result.stderr


# What is refused.

REFUSED = {
    "tp3": (["trainer.seq_length=33"], ["tp=3", "does not divide", "4", "heads", "; "]),
    "pp9": ([], ["pp=9", "5 units", "; "]),
    "dp3": ([], ["global_batch_size", "4", "micro_batch_size=2", "3 data-parallel ranks", "multiple of 6"]),
    "tp4": (["trainer.seq_length=30"], ["tp=4 does not divide trainer.seq_length=30", "sequence_parallel=false"]),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_that_does_not_fit_is_refused_in_a_sentence_before_anything_is_begun(
    layout: str, folder: Path, tmp_path: Path, options: list[str]
) -> None:
    fields, words = REFUSED[layout]
    shutil.copy(folder / "text.txt", tmp_path)
    more = [word for field in fields for word in ("--set", field)]
    command = begin(tmp_path, *MPLUG, "train", "--parallel", layout, *options, *more)
    result = command.ended()
    assert_one_sentence(result, 2, *words)
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()
    command.assert_nothing_is_left()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *MPLUG)


def test_nobody_trains_where_torchrun_has_started_too_few_processes(
    folder: Path, tmp_path: Path, options: list[str]
) -> None:
    shutil.copy(folder / "text.txt", tmp_path)
    command = begin(tmp_path, *TORCHRUN, "train", "--parallel", "tp4", *options)
    result = command.ended()
    assert result.returncode != 0
    (sentence,) = {line for line in result.stderr.splitlines() if line.startswith("mplug: ")}
    assert all(word in sentence for word in ("'tp4'", "4 processes", "torchrun has started 2"))
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()
    command.assert_nothing_is_left()


def test_a_port_that_is_in_use_is_refused_by_its_number(folder: Path, options: list[str]) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = begin(folder, *MPLUG, "train", "--parallel", "tp2", "--master-port", port, *options)
        assert_one_sentence(command.ended(), 2, f"--master-port {port}", "in use")
    command.assert_nothing_is_left()


# The same run, whoever starts its processes.


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_several_processes_give_the_losses_of_one_and_write_one_record(layout: str, whole: Whole) -> None:
    run = whole(layout)
    assert_same_losses(run, whole(""))
    size = json.loads((run / "record.json").read_text())["world_size"]
    assert size == (4 if layout == "tp2pp2" else 2)
    assert sorted(path.name for path in (run / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(size)]
    assert steps_saved(run) == [15, 20]


@pytest.mark.parametrize(
    ("layout", "becomes"),
    [
        pytest.param("tp2", "tp2", marks=pytest.mark.wide("layouts")),
        pytest.param("pp2", "pp2", marks=pytest.mark.wide("layouts")),
        pytest.param("", "dp2", marks=pytest.mark.wide("layouts")),
    ],
)
def test_processes_of_torchrun_join_and_those_that_are_left_are_data_parallel(
    layout: str, becomes: str, folder: Path, options: list[str], whole: Whole
) -> None:
    name = f"torchrun-{becomes}"
    command = begin(folder, *TORCHRUN, "train", "--name", name, "--parallel", layout, *options)
    result = command.ended()
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done in") == 1
    assert_same_losses(folder / "runs" / name, whole(""))
    assert json.loads((folder / "runs" / name / "record.json").read_text())["layout"] == becomes
    command.assert_nothing_is_left()


def test_processes_of_mpirun_join(folder: Path, options: list[str], whole: Whole) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no 'mpirun' here")
    words = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MPLUG)
    command = begin(folder, *words, "train", "--name", "mpirun", "--parallel", "tp2", *options, MASTER_PORT=free_port())
    result = command.ended()
    assert result.returncode == 0, result.stderr
    assert_same_losses(folder / "runs" / "mpirun", whole(""))
    command.assert_nothing_is_left()


SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_processes_of_srun_on_two_machines_join_and_agree_on_a_run_without_a_name(
    folder: Path, tmp_path: Path, options: list[str], whole: Whole, two_machines: Machines
) -> None:
    """The host name of each machine stands for 127.0.1.1 there, as Debian installs it."""
    shutil.copy(folder / "text.txt", tmp_path)
    words = (*MPLUG, "train", "--parallel", "dp2pp2", *options)
    commands = []
    for rank in range(4):
        machine, slurm = two_machines[rank // 2], {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2)}
        environment = {**SRUN, **slurm, "SLURM_LOCALID": str(rank % 2)}
        commands.append(begin(tmp_path, *words, machine=machine.pid, **environment))
        time.sleep(0.3)  # a generated name has the second in which the process starts
    results = [command.ended() for command in commands]
    assert [result.returncode for result in results] == [0] * 4, [result.stderr for result in results]
    assert [result.stdout.count("done in") for result in results] == [1, 0, 0, 0]
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (run / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(4)]
    assert_same_losses(run, whole(""))
    for command in commands:
        command.assert_nothing_is_left()


@pytest.mark.wide("machines")
@pytest.mark.parametrize("way", ["by name", "by IPv6 address"])
def test_processes_of_torchrun_on_two_machines_join(
    way: str, folder: Path, options: list[str], whole: Whole, two_machines: Machines
) -> None:
    name, first = f"torchrun-{way.replace(' ', '-')}", two_machines[0]
    commands = []
    for number, machine in enumerate(two_machines):
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.name}:29400"]
        if way == "by IPv6 address":
            machine.run("ip", "-4", "address", "flush", "dev", "eth0")
            meeting = [f"--node-rank={number}", f"--master-addr={first.address6}", "--master-port=29400"]
        words = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *meeting, *MPLUG, "train")
        commands.append(begin(folder, *words, "--name", name, "--parallel", "dp2pp2", *options, machine=machine.pid))
    results = [command.ended() for command in commands]
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    assert_same_losses(folder / "runs" / name, whole(""))


@pytest.mark.wide("machines")
def test_processes_of_mpirun_on_two_machines_join(
    folder: Path, tmp_path: Path, options: list[str], whole: Whole, two_machines: Machines
) -> None:
    """Open MPI 4 provides the address; with Open MPI 5 the command is refused until the user gives one."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no 'mpirun' here")
    agent = tmp_path / "agent"
    enter = [f'{m.name}) exec nsenter --target={m.pid} --net --uts --mount -- sh -c "$*";;' for m in two_machines]
    agent.write_text("#!/bin/sh\nhost=$1; shift\ncase $host in\n" + "\n".join(enter) + "\nesac\nexit 1\n")
    agent.chmod(0o755)
    agents = {"OMPI_MCA_plm_rsh_agent": str(agent), "PRTE_MCA_plm_ssh_agent": str(agent)}
    hosts = ("--host", "node01:2,node02:2", "--map-by", "ppr:2:node", "-n", "4")
    train = (sys.executable, *MPLUG, "train", "--name", "mpirun-on-two", "--parallel", "dp2pp2", *options)
    provided = "Open MPI) 4" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout

    def ended(*more: str) -> subprocess.CompletedProcess[str]:
        words = two_machines[0].words(mpirun, "--allow-run-as-root", *hosts, *more, *train, cwd=folder)
        return subprocess.run(words, env={**os.environ, **agents}, capture_output=True, text=True, timeout=PATIENCE)

    if not provided:
        refused = ended()
        assert refused.returncode == 2, refused.stderr
        assert "provides no address at which they can meet; set MASTER_ADDR" in refused.stderr
    result = ended(*(() if provided else ("-x", "MASTER_ADDR=node01")))
    assert result.returncode == 0, result.stderr
    assert_same_losses(folder / "runs" / "mpirun-on-two", whole(""))


def test_machines_that_do_not_share_the_folder_of_the_run_are_refused(
    folder: Path, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    commands = []
    for rank in (0, 1):
        own = tmp_path / f"disk{rank}"
        own.mkdir()
        shutil.copy(folder / "text.txt", own)
        lines = (
            "from mplug.training import shared_folder as sharing",
            "from mplug import __main__",
            "sharing.PATIENCE = 0.5",
            "__main__.main()",
        )
        (own / "impatient.py").write_text("\n".join(lines))
        environment = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "MASTER_ADDR": "127.0.0.1"}
        commands.append(begin(own, "-m", "impatient", "train", *options, **slurm, **environment))
    for command in commands:
        result = command.ended()
        assert_one_sentence(
            result, 2, "rank 1 on", f"the folder '{tmp_path}/disk0/runs' of rank 0", "all machines share"
        )
    assert list(tmp_path.glob("disk*/runs/*")) == []


# What ends a run.


def endless(folder: Path, options: list[str], name: str, *words: str, layout: str = "tp2", **env: str) -> Command:
    """A run of many steps that has begun."""
    options = [*options, "--set", "trainer.steps=100000", "--set", "checkpoint.every=0", *words]
    command = begin(folder, *MPLUG, "train", "--name", name, "--parallel", layout, *options, **env)
    wait_for_steps(command, folder / "runs" / name, 2)
    return command


def wait_for_steps(command: Command, run: Path, number: int) -> None:
    def there() -> bool:
        assert command.process.poll() is None, command.process.communicate()
        path = run / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= number

    poll(there, f"{run.name} has done {number} steps")


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2", marks=pytest.mark.wide("kills"))])
def test_a_worker_that_is_killed_ends_the_run_in_a_sentence_that_names_its_rank(
    layout: str, folder: Path, options: list[str]
) -> None:
    command = endless(folder, options, f"killed-{layout}", layout=layout)
    worker = command.worker(1)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    assert_one_sentence(command.ended(), 1, "rank 1", socket.gethostname(), "in step", "SIGKILL")
    command.assert_nothing_is_left()


HOW_WORKERS_FAIL = [
    ("tp2", 1, signal.SIGKILL),
    pytest.param("dp2", 1, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
    pytest.param("dp2tp2", 2, signal.SIGKILL, marks=pytest.mark.wide("kills")),
    pytest.param("tp2pp2", 0, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
]


@pytest.mark.parametrize(("layout", "rank", "number"), HOW_WORKERS_FAIL)
def test_with_a_restart_a_run_of_which_a_worker_is_killed_or_stopped_ends_as_if_nothing_had_happened(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same, layout: str, rank: int, number: signal.Signals
) -> None:
    words = (
        "--name",
        f"restarted-{layout}",
        "--parallel",
        layout,
        "--restarts",
        "1",
        "--set",
        "extensions.watchdog.timeout=6",
    )
    command, run = begin(folder, *MPLUG, "train", *words, *options), folder / "runs" / f"restarted-{layout}"
    wait_for_steps(command, run, 7)
    poll(lambda: any((run / "checkpoints").glob("step_*")), f"{run.name} has saved a checkpoint")
    worker = command.worker(rank)
    assert worker is not None
    os.kill(worker, number)
    result = command.ended()
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert f"rank {rank}" in result.stderr
    assert ("stopped sending heartbeats" in result.stderr) == (number == signal.SIGSTOP)
    assert "continuing from step" in result.stderr
    assert "restart 1 of 1" in result.stderr
    assert figures(run) == figures(whole(layout))
    assert_bitwise(saved_at(run, 20), saved_at(whole(layout), 20))
    command.assert_nothing_is_left()


@pytest.mark.wide("kills")
def test_torchrun_restarts_a_run_by_its_own_option(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1")
    words = ("--master-port", free_port(), *MPLUG, "train", "--name", "torchrun-restarted", "--parallel", "tp2")
    command, run = begin(folder, *torchrun, *words, *options), folder / "runs" / "torchrun-restarted"
    wait_for_steps(command, run, 7)
    worker = command.worker(1)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    result = command.ended()
    assert result.returncode == 0, result.stderr
    assert figures(run) == figures(whole("tp2"))
    assert_bitwise(saved_at(run, 20), saved_at(whole("tp2"), 20))


def test_a_run_that_torchrun_may_restart_needs_a_name(folder: Path, options: list[str]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    command = begin(folder, *torchrun, "--master-port", free_port(), *MPLUG, "train", "--parallel", "tp2", *options)
    result = command.ended()
    assert result.returncode != 0
    assert "add --name" in result.stderr


def test_workers_do_not_outlive_the_command_that_is_killed(folder: Path, options: list[str]) -> None:
    command = endless(folder, options, "orphans")
    assert command.worker(0)
    assert command.worker(1)
    command.process.kill()
    command.assert_nothing_is_left()
    command.ended()


FALLS = """
from pydantic import BaseModel, ConfigDict, Field
from mplug import RunError, UsageError, WeightExchange, hookimpl

class Falls:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        error: str = Field("ValueError", description="what is raised")

    def __init__(self, config):
        self.error = {"ValueError": ValueError, "RunError": RunError, "UsageError": UsageError}[config.error]

    @hookimpl
    def wrap_model(self, run, model):
        def fall():
            if run.rank == 1 and run.step == 2:
                raise self.error("over the second step")

        model.exchanges.append(WeightExchange(begin=fall, wait=None))
"""


def installed(site: Path, name: str, target: str, source: str) -> str:
    """A folder for PYTHONPATH in which an extension is installed."""
    information = site / f"acme_{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (site / f"acme_{name}.py").write_text(source)
    facts = f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\nSummary: {target}\nRequires-Dist: mplug>=0.1\n"
    (information / "METADATA").write_text(facts)
    (information / "entry_points.txt").write_text(f"[mplug.extensions]\n{name} = acme_{name}:{target}\n")
    return str(site)


@pytest.fixture(scope="module")
def falls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH in which an extension is installed that fails on rank 1."""
    return installed(tmp_path_factory.mktemp("falls"), "falls", "Falls", FALLS)


HURRIES = """
import time
from pydantic import BaseModel, ConfigDict
from mplug import hookimpl

class Hurries:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config):
        pass

    @hookimpl
    def step_started(self, run):
        if run.step == 3:
            now = time.time
            time.time = lambda: now() + 3600
"""


def test_time_ends_a_run_before_it_is_over_and_what_was_done_is_saved(folder: Path, options: list[str]) -> None:
    """An extension puts the clock forward by an hour in the third step or the one after it."""
    site = installed(folder / "hurries", "hurries", "Hurries", HURRIES)
    words = ("--name", "timed", "--parallel", "tp2", "--max-minutes", "30", "--set", "extensions.hurries={}")
    result = begin(folder, *MPLUG, "train", *options, *words, PYTHONPATH=site).ended()
    assert result.returncode == 0, result.stderr
    run = folder / "runs" / "timed"
    (step,) = steps_saved(run)
    assert 3 <= step <= 4
    assert f"out of time after step {step}, which is saved" in result.stdout
    assert metrics(run)[-1]["step"] == step


@pytest.mark.parametrize(
    ("error", "status"),
    [("ValueError", 1), ("UsageError", 2), pytest.param("RunError", 1, marks=pytest.mark.wide("kills"))],
)
def test_an_error_of_one_worker_ends_the_run_in_one_sentence(
    error: str, status: int, folder: Path, options: list[str], falls: str
) -> None:
    name = f"falls-{error}"
    words = ("--name", name, "--parallel", "tp2", "--set", f"extensions.falls.error={error}")
    command = begin(folder, *MPLUG, "train", *options, *words, PYTHONPATH=falls)
    result = command.ended()
    named = ("rank 1",) if error == "ValueError" else ()
    assert_one_sentence(result, status, "over the second step", *named)
    command.assert_nothing_is_left()
    assert metrics(folder / "runs" / name)[-1]["step"] <= 2
    if error == "ValueError":
        log = (folder / "runs" / name / "logs" / "rank1.log").read_text()
        assert all(words in log for words in ("Traceback", "acme_falls.py", "ValueError: over the second step"))


def test_a_signal_reaches_the_processes_that_live_though_others_have_died() -> None:
    lines = Pipes(3)
    lines.child_ends[1].close()
    with Handler(lines) as handler:
        handler._handle(signal.SIGTERM, None)
        handler._handle(signal.SIGINT, None)  # at once: of the same stop
    assert handler.signal == signal.SIGTERM
    assert [lines.child_ends[rank].recv() for rank in (0, 2)] == [signal.SIGTERM] * 2
    handler.when -= 60
    handler._handle(signal.SIGINT, None)  # later: everybody ends
    assert lines.own_ends == {}
    lines.listen(0.0)


def test_what_failed_before_a_signal_is_told_and_not_the_signal() -> None:
    lines = Pipes(2)
    lines.child_ends[1].send(("RunError", "no space left on the device"))
    lines.listen(0.1)
    assert lines.failed_before(time.monotonic() - 60)
    assert str(lines.first_failure({})) == "no space left on the device"
    lines.close()


def test_a_process_that_elastic_ends_has_not_failed() -> None:
    lines = Pipes(2)
    lines.child_ends[0].send(("ValueError", "over the second step"))
    lines.child_ends[1].send(TERMINATED)
    lines.child_ends[1].close()  # heard at once, as a death would be that had caused the other's error
    for _ in range(3):
        lines.listen(0.05)
    assert str(lines.first_failure({})).endswith("failed with ValueError: over the second step")
    assert lines.failing_for() > 0
    lines.close()


def test_a_run_that_fails_again_and_again_ends_with_its_restarts(folder: Path, options: list[str], falls: str) -> None:
    words = ("--name", "falls-again", "--parallel", "tp2", "--set", "extensions.falls.error=ValueError")
    command = begin(folder, *MPLUG, "train", *options, *words, "--restarts", "1", PYTHONPATH=falls)
    result = command.ended()
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert "from scratch (restart 1 of 1)" in first
    assert "over the second step" in second
    command.assert_nothing_is_left()


def test_a_loss_that_is_not_finite_is_not_tried_again(folder: Path, options: list[str]) -> None:
    words = ("--name", "diverged", "--restarts", "3", "--set", "optimizer.lr=1e30")
    result = begin(folder, *MPLUG, "train", *options, *words).ended()
    assert_one_sentence(result, 1, "has a loss of", "trainer.nonfinite=skip")


def stopped(folder: Path, options: list[str], name: str, stop: Callable[[Command], None], number: int) -> Path:
    """A tp2 run that a signal has ended between two steps."""
    command, run = begin(folder, *MPLUG, "train", "--name", name, "--parallel", "tp2", *options), folder / "runs" / name
    wait_for_steps(command, run, 3)
    stop(command)
    result = command.ended()
    assert result.returncode == 128 + number, result.stdout + result.stderr
    assert result.stderr == (STOPPING.decode() if number == signal.SIGINT else "")
    command.assert_nothing_is_left()
    last = metrics(run)[-1]["step"]
    assert 3 <= last < 20
    assert steps_saved(run)[-1] == last
    assert f"stopped after step {last}" in result.stdout
    return run


def terminate_the_command(command: Command) -> None:
    command.process.terminate()


def press_ctrl_c(command: Command) -> None:
    os.killpg(command.process.pid, signal.SIGINT)


def terminate_one_worker(command: Command) -> None:
    worker = command.worker(1)
    assert worker is not None
    os.kill(worker, signal.SIGTERM)


STOPS = {
    "sigterm": (terminate_the_command, signal.SIGTERM),
    "ctrl-c": (press_ctrl_c, signal.SIGINT),
    "sigterm-to-rank-1": (terminate_one_worker, signal.SIGTERM),
}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.wide("kills")) for how in ("sigterm", "ctrl-c")), "sigterm-to-rank-1"]
)
def test_a_signal_ends_the_run_after_a_step_that_all_ranks_save_and_resuming_is_bitwise_the_uninterrupted_run(
    how: str, folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    run = stopped(folder, options, how, *STOPS[how])
    command = begin(folder, *MPLUG, "train", "--resume", "--name", how)
    result = command.ended()
    assert result.returncode == 0, result.stderr
    assert figures(run) == figures(whole("tp2"))
    assert_bitwise(saved_at(run, 20), saved_at(whole("tp2"), 20))


# Checkpoints under other layouts.


def resumed(run: Path, layout: str, steps: int) -> None:
    words = ("--resume", "--name", run.name, "--parallel", layout, "--set", f"trainer.steps={steps}")
    result = begin(run.parent.parent, *MPLUG, "train", *words).ended()
    assert result.returncode == 0, result.stderr
    assert metrics(run)[-1]["step"] == steps


def copy_until(run: Path, name: str, step: int) -> Path:
    """A copy of a run as it was when it had saved a step."""
    copied = run.parent / name
    later = {f"step_{other:08d}" for other in steps_saved(run) if other > step}
    shutil.copytree(run, copied, ignore=lambda _, names: later & set(names))
    return copied


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2pp2"])
def test_a_checkpoint_holds_the_logical_tensors_of_one_process(layout: str, whole: Whole, logical: Logical) -> None:
    for step in (15, 20):
        assert_close(logical(saved_at(whole(layout), step)), logical(saved_at(whole(""), step)))


def test_a_run_of_tp2pp2_goes_on_in_one_process(whole: Whole) -> None:
    moved = copy_until(whole("tp2pp2"), "alone", 15)
    resumed(moved, "", 20)
    assert_same_losses(moved, whole(""))


def test_a_disk_that_is_full_ends_all_ranks_and_leaves_the_earlier_checkpoint(
    folder: Path, options: list[str], small_disk: Path
) -> None:
    shutil.copy(folder / "text.txt", small_disk)
    words = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep=9", "--name", "full", "--parallel", "tp2")
    small = ("--set", "trainer.precision=fp32")  # the first checkpoint must fit
    command = begin(small_disk, *MPLUG, "train", *options, *words, *small)
    result = command.ended()
    saved = steps_saved(small_disk / "runs" / "full")
    following = f"step_{saved[-1] + 1:08d}"
    assert_one_sentence(result, 1, following, "no space left", f"step_{saved[-1]:08d}", "intact")
    command.assert_nothing_is_left()


# What is seen before a run.


def test_a_layout_of_64_ranks_for_175b_is_explained_without_processes(folder: Path) -> None:
    command = begin(folder, *MPLUG, "explain", "--preset", "175b", "--parallel", "tp8pp8")
    result = command.ended()
    assert result.returncode == 0, result.stderr
    words = ("64 ranks", "blocks.12 to 23", "parallel/tp", "Linear.gather", "blocks.*.attn.qkv.weight", "weights")
    assert [word for word in words if word not in result.stdout] == []
