"""Runs on machines that have no common folder: a store joins their checkpoints."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="stores need fsspec")

import torch
from mplug_store.address import Store
from mplug_store.checkpoints import MANIFEST
from mplug_store.download import newest_first
from mplug_store.joined import complete
from safetensors.torch import load_file

from mplug.training.assembly import build
from mplug_saving.folder import newest, read_valid
from mplug_saving.position import Position
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run

# In one process per machine, each with a folder of its own.


def saved(folder: Path, layout: str, asynchronous: bool, steps: list[int]) -> list[str]:
    """Be the only rank of a machine. Save at some steps, copy what is there, and list what is left in its folder."""
    address = f"file://{folder / 'bucket'}"
    settings = {"extensions.store.address": address, "extensions.store.own_disks": True, "checkpoint.keep": 2}
    run = tiny_run({**settings, "parallel.layout": layout, "checkpoint.asynchronous": asynchronous})
    run.directory = folder / f"machine{run.rank}" / "runs" / "first"
    run.directory.mkdir(parents=True, exist_ok=True)
    run.shared_folder, run.sees_first_folder = False, run.rank == 0
    position = Position(run, build(run))
    run.hooks.observe("run_started", run=run)
    for step in steps:
        run.step = step
        position.save()
        position.saver.wait()
        for path in position.saver.saved():
            run.hooks.observe("checkpoint_saved", run=run, path=path)
    run.hooks.observe("run_finished", run=run)
    return sorted(path.relative_to(run.checkpoints).as_posix() for path in run.checkpoints.rglob("*.*"))


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()}


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.wide("machines"))])
def test_the_store_has_the_checkpoint_of_which_each_machine_has_a_part(tmp_path: Path, asynchronous: bool) -> None:
    first, second = run_workers(2, saved, tmp_path, "fsdp2", asynchronous, [1, 2])
    if not asynchronous:  # a second process saves a step again
        first, second = run_workers(2, saved, tmp_path, "fsdp2", asynchronous, [2])
    assert first == [f"step_0000000{n}/{name}" for n in (1, 2) for name in (MANIFEST, _part(0, n, asynchronous))]
    assert second == [f"step_0000000{n}/{name}" for n in (1, 2) for name in (MANIFEST, _part(1, n, asynchronous))]
    store = Store(f"file://{tmp_path}/bucket/first")
    assert [one.step for one in newest_first(store)] == [2, 1]
    empty = tmp_path / "third" / "runs" / "first"
    for directory in (empty, tmp_path / "machine1" / "runs" / "first"):
        found = complete(store, directory)
        assert found is not None
        assert found.step == 2
        path = newest(directory / "checkpoints")
        assert path.name == "step_00000002"
        read_valid(path)
    if asynchronous:
        return
    shared = run_workers(2, saved_together, tmp_path / "shared")[0]
    expected, joined = tensors_in(shared), tensors_in(newest(empty / "checkpoints"))
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], one) for name, one in expected.items())


def _part(rank: int, step: int, once: bool) -> str:
    """The file of a rank. If step 2 was saved twice, its second files have other names."""
    return f"rank{rank:05d}.2.safetensors" if step == 2 and not once else f"rank{rank:05d}.safetensors"


def saved_together(folder: Path) -> Path:
    """Be a rank of a run with one folder, which saves step 2."""
    run = tiny_run({"parallel.layout": "fsdp2"})
    run.directory, run.step = folder, 2
    position = Position(run, build(run))
    position.save()
    position.saver.wait()
    return newest(run.checkpoints)


# Kills in the completion of a machine's folder.

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from mplug_store.address import Store
from mplug_store.joined import complete

address, machine, copies = sys.argv[1:]
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}

def killed(folder, number):
    done = 0

    def changing():
        nonlocal done
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    def before(event, arguments):
        written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (written or event in CHANGES) and str(arguments[0]).startswith(folder):
            changing()

    def torn(self, name, target):
        target.write(b"torn")
        target.flush()
        changing()
        target.seek(0)
        return copied(self, name, target)

    copied, Store.copy_to = Store.copy_to, torn
    sys.addaudithook(before)
    complete(Store(address), Path(folder))
    os._exit(0)

status, number = None, 0
while status != 0:
    folder = f"{copies}/killed{number}/first"
    shutil.copytree(machine, folder)
    child = os.fork()
    if child == 0:
        killed(folder, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    number += 1
print(number)
"""


def files_in(folder: Path, *, hidden: bool = False) -> dict[str, bytes]:
    """The files of a run's folder that are hidden or not."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if ("/." in f"/{name}") == hidden}


@pytest.mark.wide("kills")
def test_a_kill_at_any_change_of_the_completion_leaves_whole_files_from_which_the_next_one_completes(
    tmp_path: Path,
) -> None:
    """The machine has parts of steps 1 and 4, a manifest of another save of step 4, and a step 6 that no store has."""
    run_workers(2, saved, tmp_path, "fsdp2", True, [1, 4])
    machine, address = tmp_path / "machine1" / "runs" / "first", f"file://{tmp_path}/bucket/first"
    newest_part, manifest = machine / "checkpoints" / "step_00000004", f"checkpoints/step_00000004/{MANIFEST}"
    shutil.copytree(newest_part, machine / "checkpoints" / "step_00000006")
    other = json.loads((machine / manifest).read_text())
    (machine / manifest).write_text(json.dumps({**other, "files": {}}))
    Store(address).write_whole("metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')
    (machine / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    whole = tmp_path / "whole" / "first"
    shutil.copytree(machine, whole)
    complete(Store(address), whole)
    before, after = files_in(machine), files_in(whole)
    assert {"checkpoints/step_00000004/rank00000.safetensors", manifest} <= after.keys()
    assert after["metrics.jsonl"].endswith(b"2}\n")
    assert not [name for name in after if "step_00000006" in name]
    words = [sys.executable, "-c", KILLED, address, str(machine), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for number in range(int(done.stdout)):
        folder = tmp_path / f"killed{number}" / "first"
        seen = files_in(folder)
        assert [name for name, content in seen.items() if content not in (before.get(name), after.get(name))] == []
        if seen.get(manifest) == after[manifest]:
            read_valid(folder / "checkpoints" / "step_00000004")
        complete(Store(address), folder)
        assert files_in(folder) == after
        assert [name for name in files_in(folder, hidden=True) if "rank" in name or "metrics" in name] == []
    assert int(done.stdout) > 10


# Real runs: two processes of srun, each in a folder of its own, as on two machines.

WORDS = (
    "--preset", "nano", "--set", "trainer.device=cpu", "--set", "trainer.precision=fp32", "--steps", "6",
    "--batch-size", "4", "--seq-length", "32", "--set", "trainer.eval_every=0", "--set", "checkpoint.every=1",
    "--set", "checkpoint.keep=2", "--set", "trainer.compile=never", "--data", "mock", "--parallel",
)  # fmt: skip
JOB = {
    "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "MASTER_ADDR": "127.0.0.1", "SLURM_LOCALID": "0",
}  # fmt: skip


def mplug(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "mplug", *words], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def on_two_machines(folders: list[Path], *words: str, port: int) -> "list[subprocess.Popen[str]]":
    return [
        mplug(folder, *words, **JOB, MASTER_PORT=str(port), SLURM_PROCID=str(rank), SLURM_NODEID=str(rank))
        for rank, folder in enumerate(folders)
    ]


def succeeded(processes: "list[subprocess.Popen[str]]") -> list[str]:
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


@pytest.mark.wide("machines")
def test_a_run_without_a_common_folder_continues_on_other_machines_and_layouts(tmp_path: Path, bucket: str) -> None:
    store = f"{bucket}/own"
    own = ("--set", f"extensions.store.address={store}", "--set", "extensions.store.own_disks=true")
    port = random.randrange(20000, 30000)
    succeeded([mplug(tmp_path / "whole", "train", "--name", "first", *WORDS, "dp1")])
    machines = [tmp_path / "a", tmp_path / "b"]
    refused = on_two_machines(machines, "train", "--name", "first", *WORDS, "fsdp2", port=port)
    for text in (process.communicate(timeout=300)[0] for process in refused):
        assert "cannot see the folder" in text
        assert "hook gather_checkpoints" in text
    running = on_two_machines(machines, "train", "--name", "first", *WORDS, "fsdp2", *own, port=port + 1)
    succeeded(running)
    for rank, folder in enumerate(machines):
        parts = newest(folder / "runs" / "first" / "checkpoints")
        assert [path.name for path in parts.glob("rank*")] == [f"rank{rank:05d}.safetensors"]
        assert len(list(parts.parent.glob("step_*"))) == 2
        assert (folder / "runs" / "first" / "store.json").exists()
    # Further on two machines, of which one has an empty disk, in the other order; then on one machine.
    machines = [tmp_path / "c", tmp_path / "a"]
    for folder in machines:
        succeeded([mplug(folder, "store", "pull", f"{store}/first")])
    further = ("train", "--resume", "--name", "first", "--steps")
    succeeded(on_two_machines(machines, *further, "8", port=port + 2))
    succeeded([mplug(tmp_path / "b", *further, "10", "--parallel", "tp2")])
    succeeded([mplug(tmp_path / "whole", *further, "10")])
    found, expected = losses(tmp_path / "b"), losses(tmp_path / "whole")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 11))
    for (step, loss), (_, other) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-5), step


@pytest.mark.wide("machines")
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.7, 1.2, 2.0])
def test_killed_machines_leave_a_complete_checkpoint_from_which_one_of_them_and_a_new_one_continue(
    tmp_path: Path, bucket: str, seconds: float
) -> None:
    address, port = f"{bucket}/killed{seconds}", random.randrange(20000, 30000)
    own = ("--set", f"extensions.store.address={address}", "--set", "extensions.store.own_disks=true")
    machines = [tmp_path / "a", tmp_path / "b"]
    words = ("train", "--name", "first", *WORDS, "fsdp2", *own, "--steps", "400")
    running, store = on_two_machines(machines, *words, port=port), Store(f"{address}/first")
    while not newest_first(store):
        assert all(process.poll() is None for process in running), succeeded(running)
        time.sleep(0.2)
    time.sleep(seconds)
    for process in running:
        process.send_signal(signal.SIGKILL)
    for process in running:
        process.communicate()
    step = newest_first(store)[0].step
    parts = newest(machines[1] / "runs" / "first" / "checkpoints")
    assert parts.is_dir()
    succeeded([mplug(tmp_path / "c", "store", "pull", f"{address}/first")])
    read_valid(newest(tmp_path / "c" / "runs" / "first" / "checkpoints"))
    machines = [tmp_path / "c", tmp_path / "b"]
    more = ("train", "--resume", "--name", "first", "--steps", str(step + 2))
    text, _ = succeeded(on_two_machines(machines, *more, port=port + 1))
    assert f"from step {step}" in text
    assert newest_first(store)[0].step == step + 2
