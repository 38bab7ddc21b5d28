"""Processes that see only their own GPU, as with srun's `--gpus-per-task=1`, and processes that would share one."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def trained(folder: Path, options: list[str], visible: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run the tasks of an srun on one machine; each of them sees the GPUs of its entry."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(len(visible))
    slurm = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_NODEID": "0", "MASTER_PORT": port}
    processes = []
    for rank, gpus in enumerate(visible):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "CUDA_VISIBLE_DEVICES": gpus}
        command = [sys.executable, "-m", "mplug", "train", "--parallel", f"dp{size}", *options]
        command += ["--set", "trainer.device=cuda"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env={**os.environ, **slurm, **own}, **pipes))
    ended = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, ended, strict=True)
    ]


@pytest.mark.gpu(2)
def test_every_task_uses_the_one_gpu_that_it_sees(tiny: list[str], tmp_path: Path) -> None:
    results = trained(tmp_path, tiny, ["0", "1"])
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]


def test_tasks_that_share_a_gpu_are_refused(tiny: list[str], tmp_path: Path) -> None:
    for result in trained(tmp_path, tiny, ["0", "0"]):
        assert result.returncode == 2, result.stderr
        assert f"2 processes on {socket.gethostname()} compute on the same GPU" in result.stderr
