"""Runs on two machines (network namespaces) whose disks have their local checkpoints."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from launched import MPLUG, SRUN, TEXT, Command, assert_same_losses, begin, poll
from machines import Machines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
SECTION = "extensions.local_checkpoints"


STEPS = ("--set", "trainer.steps=120")
"""So many that a run does not end before it is disturbed."""


@pytest.mark.wide("machines")
@pytest.mark.parametrize("fails", ["machine", "link"])
def test_a_run_continues_from_the_disk_of_one_machine_after_the_other_has_failed(
    fails: str, tmp_path: Path, options: list[str], two_machines: Machines
) -> None:
    """The other machine loses its disk. Host names tell the machines apart."""
    (tmp_path / "text.txt").write_text(TEXT)
    words = [*MPLUG, "train", *options, *STEPS, "--set", "checkpoint.every=0"]
    whole = begin(tmp_path, *words, "--name", "whole")
    local = ["--set", f"{SECTION}.folder=$LOCAL_DISK", "--set", f"{SECTION}.every=2"]

    def started(*more: str) -> list[Command]:
        found = []
        for rank in range(4):
            number, local_rank = divmod(rank, 2)
            slurm = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(number), "SLURM_LOCALID": str(local_rank)}
            environment = {**SRUN, **slurm, "LOCAL_DISK": str(tmp_path / f"disk{number}")}
            found.append(begin(tmp_path, *words, *more, machine=two_machines[number].pid, **environment))
        return found

    commands = started("--name", "one", "--parallel", "fsdp2tp2", *local)

    def is_saved() -> bool:
        ended = [command for command in commands if command.process.poll() is not None]
        assert not ended, ended[0].ended()
        return any(tmp_path.glob("disk0/one-*/step_00000006.*/rank*.json"))

    poll(is_saved, "step 6 is on the disk of node01")
    if fails == "link":
        two_machines.cut(1)
    for command in commands[2:] if fails == "machine" else commands:  # without a link, no process hears of a death
        command.kill_what_is_left()
    assert 0 not in [command.ended().returncode for command in commands]
    two_machines.mend(1)
    shutil.rmtree(tmp_path / "disk1")
    for command in [whole, *started("--name", "one", "--resume")]:
        command.succeeded()
    log = (tmp_path / "runs" / "one" / "logs" / "rank0.log").read_text()
    found = re.findall(
        r"continues after step (\d+), from its local checkpoints, with copies of the parts? of rank", log
    )
    assert int(found[-1]) >= 4
    assert_same_losses(tmp_path / "runs" / "one", tmp_path / "runs" / "whole")
