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
from distributions import installed
from machines import LINKS, Machines
from torch import Tensor
from warm import Forked

from mplug.errors import UsageError
from mplug.training.interrupt import STOPPING
from mplug_launch.launch import launch
from mplug_launch.pipes import TERMINATED, Handler, Pipes, PortInUse
from mplug_saving.names import path_of
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
TEXT = "".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26))
BEGUN: list["Command"] = []
PATIENCE = 900.0
"""Seconds until what waits is taken to wait for ever; a busy machine needs many more than a quiet one."""
Ended = subprocess.CompletedProcess[str]


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

    def worker(self, rank: int) -> int:
        """The process that writes the log of a rank."""
        for pid in self.pids():
            with suppress(OSError):
                opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                if any(path.endswith(f"/logs/rank{rank}.log") for path in opened):
                    return pid
        raise AssertionError(f"no process is rank {rank}")

    def ended(self) -> Ended:
        """What it printed, once it and all its processes have ended."""
        out, err = self.process.communicate(timeout=PATIENCE)
        poll(lambda: not self.pids(), "its processes have ended")
        return Ended(self.process.args, self.process.returncode, out, err)

    def succeeded(self) -> Ended:
        """The same of a command that succeeds."""
        result = self.ended()
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        return result

    def refused(self, status: int, *words: str) -> Ended:
        """The same of a command that ends with a status, and one line on stderr that has all these words."""
        result = self.ended()
        assert result.returncode == status, result.stdout + result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith("mplug: ")
        assert [word for word in words if word not in result.stderr] == [], result.stderr
        return result

    def kill_what_is_left(self) -> None:
        """After a test that failed: its processes are not the next test's business."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.communicate()


def poll(condition: Callable[[], Any], what: str) -> Any:
    """The condition's value as soon as it is true; AssertionError at the deadline."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)
    return value


def begin(folder: Path, *words: str, machine: int | None = None, **environment: str) -> Command:
    """Start a command in a folder and in a session of its own: a module in a fork, mpirun in an interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    if words[0] == "-m":
        process = Forked(*words[1:], cwd=folder, environment=environment, session=True, machine=machine)
        BEGUN.append(Command(process, process.output))
    else:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **pipes)
        assert started.stdout is not None
        BEGUN.append(Command(started, os.readlink(f"/proc/self/fd/{started.stdout.fileno()}")))
    return BEGUN[-1]


def train(folder: Path, name: str, *words: str, **environment: str) -> Command:
    return begin(folder, *MPLUG, "train", "--name", name, *words, **environment)


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
    path = tmp_path_factory.mktemp("launch")
    (path / "text.txt").write_text(TEXT)
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
            train(folder, name, "--parallel", layout, *options).succeeded()
            done[layout] = folder / "runs" / name
        return done[layout]

    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_bits(run: Path, reference: Path, assert_bitwise: Same) -> None:
    """Every step of the reference once with the same figures, and the same last checkpoint."""
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    found, wanted = ([[line[name] for name in names] for line in metrics(path)] for path in (run, reference))
    assert found == wanted
    assert_bitwise(saved_at(run, 20), saved_at(reference, 20))


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


# What is refused.


def test_a_layout_that_does_not_fit_is_refused_in_a_sentence_before_anything_is_begun(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    command = begin(tmp_path, *MPLUG, "train", "--parallel", "pp9", *options)
    assert command.refused(2, "pp=9", "5 units", "; ").stdout == ""
    assert not (tmp_path / "runs").exists()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TOO_LITTLE = {
    "processes": (("--standalone",), "tp4", ["'tp4'", "4 processes", "torchrun has started 2"]),
    "a name": (("--max-restarts=1",), "tp2", ["add --name"]),
}


@pytest.mark.parametrize("lacks", TOO_LITTLE)
@pytest.mark.wide("kills")
def test_nobody_trains_where_torchrun_has_started_too_few_processes_or_may_restart_a_run_without_a_name(
    lacks: str, tmp_path: Path, options: list[str]
) -> None:
    torchrun, layout, words = TOO_LITTLE[lacks]
    (tmp_path / "text.txt").write_text(TEXT)
    port = () if "--standalone" in torchrun else ("--master-port", free_port())
    result = begin(tmp_path, *TORCHRUN, *torchrun, *port, *MPLUG, "train", "--parallel", layout, *options).ended()
    assert result.returncode != 0
    (sentence,) = {line for line in result.stderr.splitlines() if line.startswith("mplug: ")}
    assert [word for word in words if word not in sentence] == []
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_port_that_is_in_use_is_refused_by_its_number(folder: Path, options: list[str]) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = begin(folder, *MPLUG, "train", "--parallel", "tp2", "--master-port", port, *options)
        command.refused(2, f"--master-port {port}", "in use")


# The same run, whoever starts its processes.


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2pp2", marks=pytest.mark.wide("layouts"))])
def test_several_processes_give_the_losses_of_one_and_write_one_record(layout: str, whole: Whole) -> None:
    run = whole(layout)
    assert_same_losses(run, whole(""))
    size = json.loads((run / "record.json").read_text())["world_size"]
    assert size == (4 if layout == "tp2pp2" else 2)
    assert sorted(path.name for path in (run / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(size)]
    assert steps_saved(run) == [15, 20]


TORCHRUN_ON_ONE = (*TORCHRUN, "--standalone", *MPLUG)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MPLUG)
STARTED = [
    *(
        pytest.param(TORCHRUN_ON_ONE, *layouts, marks=pytest.mark.wide("layouts"))
        for layouts in (("tp2", "tp2"), ("pp2", "pp2"), ("", "dp2"))
    ),
    (MPIRUN, "tp2", "tp2"),
]


@pytest.mark.parametrize(("starter", "layout", "becomes"), STARTED)
def test_processes_of_a_launcher_join_and_those_that_are_left_are_data_parallel(
    starter: tuple[str, ...], layout: str, becomes: str, folder: Path, options: list[str], whole: Whole
) -> None:
    if starter[0] == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no 'mpirun' here")
    name, port = f"{starter[0].strip('-')}-{becomes}", {"MASTER_PORT": free_port()} if starter is MPIRUN else {}
    result = begin(folder, *starter, "train", "--name", name, "--parallel", layout, *options, **port).succeeded()
    assert result.stdout.count("done in") == 1
    assert_same_losses(folder / "runs" / name, whole(""))
    assert json.loads((folder / "runs" / name / "record.json").read_text())["layout"] == becomes


SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.wide("machines")
def test_processes_of_srun_on_two_machines_join_and_agree_on_a_run_without_a_name(
    tmp_path: Path, options: list[str], whole: Whole, two_machines: Machines
) -> None:
    """The host name of each machine stands for 127.0.1.1 there, as Debian installs it."""
    (tmp_path / "text.txt").write_text(TEXT)
    words = (*MPLUG, "train", "--parallel", "dp2pp2", *options)
    commands = []
    for rank in range(4):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
        commands.append(begin(tmp_path, *words, machine=two_machines[rank // 2].pid, **SRUN, **slurm))
        time.sleep(0.3)  # a generated name has the second in which the process starts
    results = [command.succeeded() for command in commands]
    assert [result.stdout.count("done in") for result in results] == [1, 0, 0, 0]
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (run / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(4)]
    assert_same_losses(run, whole(""))


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
            machine.run(*LINKS, "no-address", "eth0", f"{machine.address}/24")
            meeting = [f"--node-rank={number}", f"--master-addr={first.address6}", "--master-port=29400"]
        words = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *meeting, *MPLUG, "train")
        commands.append(begin(folder, *words, "--name", name, "--parallel", "dp2pp2", *options, machine=machine.pid))
    for command in commands:
        command.succeeded()
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


IMPATIENT = """
from mplug import __main__
from mplug_launch import shared_folder
shared_folder.PATIENCE = 0.5
__main__.main()
"""


def test_machines_that_do_not_share_the_folder_of_the_run_are_refused(tmp_path: Path, options: list[str]) -> None:
    slurm = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    commands = []
    for rank in (0, 1):
        own = tmp_path / f"disk{rank}"
        own.mkdir()
        (own / "text.txt").write_text(TEXT)
        (own / "impatient.py").write_text(IMPATIENT)
        environment = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "MASTER_ADDR": "127.0.0.1"}
        commands.append(begin(own, "-m", "impatient", "train", *options, **slurm, **environment))
    for command in commands:
        command.refused(2, "rank 1 on", f"the folder '{tmp_path}/disk0/runs' of rank 0", "all machines share")
    assert list(tmp_path.glob("disk*/runs/*")) == []


# What ends a run.


def endless(folder: Path, options: list[str], name: str, layout: str = "tp2") -> Command:
    endless = ("--set", "trainer.steps=100000", "--set", "checkpoint.every=0")
    command = train(folder, name, "--parallel", layout, *options, *endless)
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
    command = endless(folder, options, f"killed-{layout}", layout)
    os.kill(command.worker(1), signal.SIGKILL)
    command.refused(1, "rank 1", socket.gethostname(), "in step", "SIGKILL")


HOW_WORKERS_FAIL = [
    ("tp2", 1, signal.SIGKILL),
    pytest.param("dp2", 1, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
    pytest.param("dp2tp2", 2, signal.SIGKILL, marks=pytest.mark.wide("kills")),
    pytest.param("tp2pp2", 0, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
]


@pytest.mark.parametrize(("layout", "rank", "number"), HOW_WORKERS_FAIL)
@pytest.mark.wide("kills")
def test_with_a_restart_a_run_of_which_a_worker_is_killed_or_stopped_ends_as_if_nothing_had_happened(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same, layout: str, rank: int, number: signal.Signals
) -> None:
    words = ("--restarts", "1", "--set", "extensions.watchdog.timeout=6")
    run = folder / "runs" / f"restarted-{layout}"
    command = train(folder, run.name, "--parallel", layout, *words, *options)
    wait_for_steps(command, run, 7)
    poll(lambda: any((run / "checkpoints").glob("step_*")), f"{run.name} has saved a checkpoint")
    os.kill(command.worker(rank), number)
    result = command.succeeded()
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert f"rank {rank}" in result.stderr
    assert ("stopped sending heartbeats" in result.stderr) == (number == signal.SIGSTOP)
    assert "continuing from step" in result.stderr
    assert "restart 1 of 1" in result.stderr
    assert_same_bits(run, whole(layout), assert_bitwise)


@pytest.mark.wide("kills")
def test_torchrun_restarts_a_run_by_its_own_option(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    torchrun = ("--max-restarts=1", "--monitor-interval=0.1", "--master-port", free_port())
    words = ("train", "--name", "torchrun-restarted", "--parallel", "tp2", *options)
    command, run = begin(folder, *TORCHRUN, *torchrun, *MPLUG, *words), folder / "runs" / "torchrun-restarted"
    wait_for_steps(command, run, 7)
    os.kill(command.worker(1), signal.SIGKILL)
    command.succeeded()
    assert_same_bits(run, whole("tp2"), assert_bitwise)


def test_workers_do_not_outlive_the_command_that_is_killed(folder: Path, options: list[str]) -> None:
    command = endless(folder, options, "orphans")
    assert command.worker(0) != command.worker(1)
    command.process.kill()
    command.ended()


MISCHIEF = """
import time
from pydantic import BaseModel, ConfigDict, Field
from mplug import RunError, UsageError, WeightExchange, hookimpl

ERRORS = {"ValueError": ValueError, "RunError": RunError, "UsageError": UsageError}

class Mischief:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        error: str = Field("", description="what rank 1 raises in the second step")
        hurries: bool = Field(False, description="puts the clock forward by an hour in the third step")

    def __init__(self, config):
        self.config = config

    @hookimpl
    def wrap_model(self, run, model):
        def fall():
            if run.rank == 1 and run.step == 2 and self.config.error:
                raise ERRORS[self.config.error]("over the second step")

        model.exchanges.append(WeightExchange(begin=fall, wait=None))

    @hookimpl
    def step_started(self, run):
        if run.step == 3 and self.config.hurries:
            now = time.time
            time.time = lambda: now() + 3600
"""


@pytest.fixture(scope="module")
def mischief(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH in which an extension is installed that fails or hurries."""
    site = tmp_path_factory.mktemp("mischief")
    return str(installed(site, "acme-mischief", "[mplug.extensions]\nmischief = acme_mischief:Mischief\n", MISCHIEF))


@pytest.mark.wide("kills")
def test_time_ends_a_run_before_it_is_over_and_what_was_done_is_saved(
    folder: Path, options: list[str], mischief: str
) -> None:
    """The limit is reached in the third step or the one after it."""
    words = ("--parallel", "tp2", "--max-minutes", "30", "--set", "extensions.mischief.hurries=true")
    result = train(folder, "timed", *options, *words, PYTHONPATH=mischief).succeeded()
    run = folder / "runs" / "timed"
    (step,) = steps_saved(run)
    assert 3 <= step <= 4
    assert f"out of time after step {step}, which is saved" in result.stdout
    assert metrics(run)[-1]["step"] == step


@pytest.mark.parametrize(
    ("error", "status"),
    [("ValueError", 1), ("UsageError", 2), pytest.param("RunError", 1, marks=pytest.mark.wide("kills"))],
)
@pytest.mark.wide("kills", quick=["ValueError-1"])
def test_an_error_of_one_worker_ends_the_run_in_one_sentence(
    error: str, status: int, folder: Path, options: list[str], mischief: str
) -> None:
    name = f"falls-{error}"
    words = ("--parallel", "tp2", "--set", f"extensions.mischief.error={error}")
    named = ("rank 1",) if error == "ValueError" else ()
    train(folder, name, *options, *words, PYTHONPATH=mischief).refused(status, "over the second step", *named)
    assert metrics(folder / "runs" / name)[-1]["step"] <= 2
    if error == "ValueError":
        log = (folder / "runs" / name / "logs" / "rank1.log").read_text()
        assert all(words in log for words in ("Traceback", "acme_mischief.py", "ValueError: over the second step"))


def beside_another_program(folder: str, taken: int, send: Any) -> int:
    """Find the port taken for the first `taken` times; the number of starts."""
    if os.environ["RANK"] == "1":
        time.sleep(1)
        return 0
    starts = len(list(Path(folder).iterdir())) + 1
    Path(folder, str(starts)).touch()
    if starts <= taken:
        raise PortInUse("the port is in use")
    return starts


@pytest.mark.wide("kills")
def test_processes_whose_port_was_taken_meanwhile_start_again_with_another_one(tmp_path: Path) -> None:
    assert launch(2, beside_another_program, str(tmp_path), 1) == 2
    with pytest.raises(UsageError, match="in use"):
        launch(1, beside_another_program, str(tmp_path), 9)


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


@pytest.mark.wide("kills")
def test_a_run_that_fails_again_and_again_ends_with_its_restarts(
    folder: Path, options: list[str], mischief: str
) -> None:
    words = ("--parallel", "tp2", "--set", "extensions.mischief.error=ValueError", "--restarts", "1")
    result = train(folder, "falls-again", *options, *words, PYTHONPATH=mischief).ended()
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert "from scratch (restart 1 of 1)" in first
    assert "over the second step" in second


@pytest.mark.wide("kills")
def test_a_loss_that_is_not_finite_is_not_tried_again(folder: Path, options: list[str]) -> None:
    command = train(folder, "diverged", *options, "--restarts", "3", "--set", "optimizer.lr=1e30")
    command.refused(1, "has a loss of", "trainer.nonfinite=skip")


STOPS: dict[str, tuple[Callable[[Command], None], signal.Signals]] = {
    "sigterm": (lambda command: command.process.terminate(), signal.SIGTERM),
    "ctrl-c": (lambda command: os.killpg(command.process.pid, signal.SIGINT), signal.SIGINT),
    "sigterm-to-rank-1": (lambda command: os.kill(command.worker(1), signal.SIGTERM), signal.SIGTERM),
}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.wide("kills")) for how in ("sigterm", "ctrl-c")), "sigterm-to-rank-1"]
)
@pytest.mark.wide("kills")
def test_a_signal_ends_the_run_after_a_step_that_all_ranks_save_and_resuming_is_bitwise_the_uninterrupted_run(
    how: str, folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    (stop, number), run = STOPS[how], folder / "runs" / how
    command = train(folder, how, "--parallel", "tp2", *options)
    wait_for_steps(command, run, 3)
    stop(command)
    result = command.ended()
    assert result.returncode == 128 + number, result.stdout + result.stderr
    assert result.stderr == (STOPPING.decode() if number == signal.SIGINT else "")
    last = metrics(run)[-1]["step"]
    assert 3 <= last < 20
    assert steps_saved(run)[-1] == last
    assert f"stopped after step {last}" in result.stdout
    train(folder, how, "--resume").succeeded()
    assert_same_bits(run, whole("tp2"), assert_bitwise)


# Checkpoints under other layouts.


@pytest.mark.parametrize("layout", ["tp2", "tp2pp2"])
@pytest.mark.wide("layouts", quick=["tp2"])
def test_a_checkpoint_holds_the_logical_tensors_of_one_process(layout: str, whole: Whole, logical: Logical) -> None:
    for step in (15, 20):
        found, wanted = (logical(saved_at(whole(one), step)) for one in (layout, ""))
        assert found.keys() == wanted.keys()
        off = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
        assert {name: error for name, error in off.items() if not error <= 1e-9} == {}


def test_a_run_of_tp2_goes_on_in_one_process(folder: Path, whole: Whole) -> None:
    moved = folder / "runs" / "alone"
    shutil.copytree(whole("tp2"), moved, ignore=lambda _, names: {"step_00000020"} & set(names))
    train(folder, "alone", "--resume", "--parallel", "", "--set", "trainer.steps=20").succeeded()
    assert_same_losses(moved, whole(""))


@pytest.mark.wide("kills")
def test_a_disk_that_is_full_ends_all_ranks_and_leaves_the_earlier_checkpoint(
    options: list[str], small_disk: Path
) -> None:
    (small_disk / "text.txt").write_text(TEXT)
    words = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep=9", "--parallel", "tp2")
    small = ("--set", "trainer.precision=fp32")  # the first checkpoint must fit
    result = train(small_disk, "full", *options, *words, *small).ended()
    saved = steps_saved(small_disk / "runs" / "full")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    for words in (f"step_{saved[-1] + 1:08d}", "no space left", f"step_{saved[-1]:08d}", "intact"):
        assert words in line


# What is seen before a run.


@pytest.mark.wide("layouts")
def test_a_layout_of_64_ranks_for_175b_is_explained_without_processes(folder: Path) -> None:
    result = begin(folder, *MPLUG, "explain", "--preset", "175b", "--parallel", "tp8pp8").succeeded()
    words = ("64 ranks", "blocks.12 to 23", "parallel/tp", "Linear.gather", "blocks.*.attn.qkv.weight", "weights")
    assert [word for word in words if word not in result.stdout] == []
