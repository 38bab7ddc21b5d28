"""Who starts the processes of a run: the command itself, torchrun, srun and mpirun."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from launched import MPLUG, PATIENCE, SRUN, TEXT, TORCHRUN, Whole, assert_same_losses, begin, free_port, steps_saved
from machines import LINKS, Machines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


# What is refused.


def test_a_layout_that_does_not_fit_is_refused_in_a_sentence_before_anything_is_begun(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    command = begin(tmp_path, *MPLUG, "train", "--parallel", "pp9", *options)
    assert command.refused(2, "pp=9", "5 units", "; ").stdout == ""
    assert not (tmp_path / "runs").exists()


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
