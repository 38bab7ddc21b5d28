"""Runs on two machines (network namespaces) whose disks have their local checkpoints."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from launched import MPLUG, TEXT, Command, Whole, assert_same_losses, begin, poll
from machines import Machines
from test_launchers import SRUN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
SECTION = "extensions.local_checkpoints"


@pytest.mark.wide("machines")
@pytest.mark.parametrize("fails", ["link", "machine"])
def test_a_run_continues_from_the_disk_of_one_machine_after_the_other_has_failed(
    fails: str, tmp_path: Path, options: list[str], whole: Whole, two_machines: Machines
) -> None:
    """The machine loses its link or all its processes, and its disk. Host names tell the machines apart."""
    (tmp_path / "text.txt").write_text(TEXT)
    local = [
        f"{SECTION}.folder=$LOCAL_DISK",
        f"{SECTION}.every=2",
        "checkpoint.every=0",
        "checkpoint.asynchronous=true",
    ]
    words = [*MPLUG, "train", "--name", "one", "--parallel", "fsdp2dp2", *options]
    words += [word for one in local for word in ("--set", one)]

    def started(*more: str) -> list[Command]:
        found = []
        for rank in range(4):
            number, local_rank = divmod(rank, 2)
            slurm = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(number), "SLURM_LOCALID": str(local_rank)}
            environment = {**SRUN, **slurm, "LOCAL_DISK": str(tmp_path / f"disk{number}")}
            found.append(begin(tmp_path, *words, *more, machine=two_machines[number].pid, **environment))
        return found

    commands = started()
    poll(lambda: {*tmp_path.glob("disk0/one-*/step_00000006.*/rank*.json")}, "step 6 is on the disk of node01")
    if fails == "link":
        two_machines.cut(1)
    for command in commands[2:]:
        for pid in command.pids():
            os.kill(pid, signal.SIGKILL)
    assert [command.ended().returncode != 0 for command in commands] == [True] * 4
    two_machines.mend(1)
    shutil.rmtree(tmp_path / "disk1")
    for command in started("--resume"):
        command.succeeded()
    log = (tmp_path / "runs" / "one" / "logs" / "rank0.log").read_text()
    found = re.findall(
        r"the run continues after step (\d+), from its local checkpoints, with copies of the parts? of", log
    )
    assert int(found[-1]) >= 4
    assert_same_losses(tmp_path / "runs" / "one", whole(""))
