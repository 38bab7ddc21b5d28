"""Local checkpoints: a run continues from the disks of its machines, with the losses of an undisturbed run.

The machines are processes with a folder each, and with a name of their own (`extensions.local_checkpoints.machine`).
"""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deaths import assert_figures, figures, figures_of_one_process, healed

from mplug.cli.train_start import beginning
from mplug.distributed.supervision import Send
from mplug.errors import UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.job import Job, Outcome
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug.training.stepper import DefaultStepper
from mplug_heal import local_files, local_saves
from mplug_heal.local_files import Key, Part, found_on, read_part, write_part
from mplug_heal.machines import Place, keepers, place_of_process, readers, refusal
from mplug_saving.boxes import Boxed
from mplug_saving.folder import complete
from mplug_saving.names import ELSEWHERE
from mplug_saving.starting import Saving
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, as_rank, tiny_config
from mplug_testing.workers import WorkerFailed

STEPS = 8
SECTION = "extensions.local_checkpoints"
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "trainer.device": "cpu",
    "checkpoint.every": 4,
}
LOCAL = {f"{SECTION}.folder": "$LOCAL_DISK", f"{SECTION}.machine": "$LOCAL_MACHINE", f"{SECTION}.every": 2}


class Killed(BaseException):
    """All processes of the run end at this moment."""


def attempt(
    folder: Path, size: int, layout: str, settings: dict[str, Any], ends_in: int, largest: int, torn: int
) -> list[str]:
    """Be one rank of an attempt that ends in a step; the files on the disk of its machine. There are two machines.

    With `largest`, no local file of rank 1 may have more bytes. With `torn`, a process is killed in the middle of its
    first file of this step.
    """
    rank = dist.get_rank()
    machine = rank * 2 // size
    os.environ["LOCAL_DISK"], os.environ["LOCAL_MACHINE"] = str(folder / f"disk{machine}"), f"machine{machine}"
    observers = {"host/metrics": MetricsFile()} if rank == 0 else {}
    config = tiny_config({**SETTINGS, **LOCAL, **settings, "parallel.layout": layout})
    run = as_rank(prepare(config, observers, folder / "runs" / "one"))
    if largest and rank == 1:
        _limit_local_files(largest)
    _die_in_a_file_of(torn)
    saved = complete(run.checkpoints)
    _before_update(run, ends_in)
    try:
        train(run, saved[-1] if saved else None)
    except Killed:
        for writing in [*local_saves._UNFINISHED]:  # the test looks at what is written
            writing.join()
    return [path.relative_to(folder).as_posix() for path in sorted((folder / f"disk{machine}").rglob("rank*.s*"))]


def _limit_local_files(largest: int) -> None:
    save, (_, hard) = local_files._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
        try:
            save(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    local_files._save = limited


def _die_in_a_file_of(step: int) -> None:
    save = local_files._save

    def half(tensors: dict[str, torch.Tensor], path: Path, about: str) -> None:
        save(tensors, path, about)
        if f"step_{step:08}" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    local_files._save = half


def _before_update(run: Run, step: int) -> None:
    update = DefaultStepper.update

    def ending(self: DefaultStepper, *arguments: Any) -> Any:
        if run.step == step:
            raise Killed
        return update(self, *arguments)

    DefaultStepper.update = ending  # type: ignore[method-assign]


def attempted(
    folder: Path, layout: str, ends_in: int = 0, settings: dict[str, Any] | None = None, largest: int = 0, torn: int = 0
) -> list[list[str]]:
    size = prepare(tiny_config({**SETTINGS, "parallel.layout": layout})).mesh.world_size
    return run_workers(size, attempt, folder, size, layout, settings or {}, ends_in, largest, torn)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The steps of one process."""
    return figures_of_one_process(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def assert_same(folder: Path, expected: list[dict[str, float]]) -> None:
    assert_figures(folder, expected, STEPS)


def log_of(folder: Path) -> str:
    return (folder / "runs" / "one" / "logs" / "rank0.log").read_text()


def origin(folder: Path) -> str:
    """What rank 0 says of the copies from which it has continued last; the empty string if it used a checkpoint."""
    text = log_of(folder)
    found = re.findall(r"the run continues (after step \d+, from .*)", text.rpartition("began as rank")[0])
    return found[-1] if found else ""


def parts(folder: Path, disk: int, step: int) -> list[Path]:
    return sorted(folder.glob(f"disk{disk}/*/step_{step:08}.*/rank*.safetensors"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def replaced(folder: Path) -> None:
    shutil.rmtree(folder / "disk1")


def damaged(folder: Path) -> None:
    damage(parts(folder, 0, 6)[0])


def lost(folder: Path) -> None:
    """No source has the part of rank 0."""
    damage(parts(folder, 0, 6)[0])
    damage(parts(folder, 1, 6)[0])


def emptied(folder: Path) -> None:
    shutil.rmtree(folder / "disk0")
    shutil.rmtree(folder / "disk1")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "all processes killed": (lambda _: None, "after step 6, from its local checkpoints"),
    "a machine replaced": (replaced, "after step 6, from its local checkpoints, with copies of the part"),
    "a file damaged": (damaged, "after step 6, from its local checkpoints, with copies of the part of rank 0 on"),
    "both copies damaged": (lost, "after step 4, from its local checkpoints"),
    "both machines replaced": (emptied, ""),
}


def test_a_run_that_is_killed_in_the_middle_of_a_file_continues_from_the_disk_of_a_machine_that_is_left(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    """The newest local checkpoint is torn, so the one before is used. One machine has lost its disk."""
    settings = {"checkpoint.every": 0}
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        attempted(tmp_path, "fsdp2", settings=settings, torn=6)
    torn = [*tmp_path.glob("disk*/*/step_00000006.*/.rank*.partial")]
    assert torn
    assert [len(parts(tmp_path, disk, step)) for disk in (0, 1) for step in (2, 4, 6)] == [0, 2, 0] * 2
    replaced(tmp_path)
    assert attempted(tmp_path, "fsdp2", settings=settings) == [[], []]  # its last checkpoint is newer
    assert not [*tmp_path.glob("disk*/one-*")]
    assert (
        origin(tmp_path)
        == "after step 4, from its local checkpoints, with copies of the part of rank 1 on other machines"
    )
    assert_same(tmp_path, undisturbed)


@pytest.mark.wide("kills")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", ["zero2", "fsdp2", "dp2tp2", "tp2pp2", "zero2pp2"])
def test_each_source_gives_the_losses_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[dict[str, float]], layout: str, fault: str
) -> None:
    happens, expected = FAULTS[fault]
    attempted(tmp_path, layout, ends_in=STEPS)
    happens(tmp_path)
    attempted(tmp_path, layout)
    assert origin(tmp_path).startswith(expected)
    assert bool(origin(tmp_path)) == bool(expected)
    assert_same(tmp_path, undisturbed)
    if "damaged" in fault:
        log = log_of(tmp_path)
        assert re.search(r"rank00000.safetensors' on .* is damaged: it has changed since it was saved", log)
        lacking = "the disks lack the part of rank 0 of the local checkpoint of step 6; it is skipped"
        assert (lacking in log) == (fault == "both copies damaged")


@pytest.mark.wide("kills")
@pytest.mark.parametrize("ends_in", [1, 2, 3, 4, 5])
def test_a_run_that_ends_in_any_step_repeats_the_steps_since_the_last_local_checkpoint(
    tmp_path: Path, undisturbed: list[dict[str, float]], ends_in: int
) -> None:
    attempted(tmp_path, "fsdp2", ends_in=ends_in)
    attempted(tmp_path, "fsdp2")
    last = (ends_in - 1) // 2 * 2
    assert origin(tmp_path).startswith(f"after step {last}, " if last else "")
    assert_same(tmp_path, undisturbed)


@pytest.mark.wide("kills")
def test_a_run_continues_from_local_disks_under_another_layout(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    attempted(tmp_path, "fsdp2", ends_in=STEPS)
    replaced(tmp_path)
    attempted(tmp_path, "tp2pp2")
    assert origin(tmp_path).startswith("after step 6")
    assert_same(tmp_path, undisturbed)


@pytest.mark.wide("kills")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_takes_no_file_is_named_and_training_continues(
    tmp_path: Path, undisturbed: list[dict[str, float]], asynchronous: bool
) -> None:
    settings = {"checkpoint.asynchronous": asynchronous, "checkpoint.every": 0}
    found = attempted(tmp_path, "zero2", settings=settings, largest=3000)
    assert found == [[], []]
    log = log_of(tmp_path)
    assert re.search(r"local checkpoint of step 2 on rank 1, on .* \(machine1\), in '\$LOCAL_DISK': .*too large", log)
    assert "there is no earlier one, and training continues" in log
    assert_same(tmp_path, undisturbed)


def dying_twice(job: Job, _: object, send: Send) -> Outcome:
    """Two ranks die in the fifth step, so the memory of the others lacks a part of the state."""
    from mplug.distributed.world import attempt as number
    from mplug.training.job import work

    if number() == 0 and os.environ["RANK"] in ("1", "3"):
        update = DefaultStepper.update

        def ending(self: DefaultStepper, *arguments: Any) -> Any:
            if self.run.step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, *arguments)

        DefaultStepper.update = ending  # type: ignore[method-assign]
    return work(job, send)


@pytest.mark.wide("kills")
def test_processes_whose_memory_lacks_a_part_go_on_from_the_local_disk(tmp_path: Path) -> None:
    settings = {f"{SECTION}.folder": str(tmp_path / "disk"), f"{SECTION}.every": 1, "extensions.heal.spares": 2}
    settings |= {"checkpoint.asynchronous": False}
    healed(tmp_path / "whole", "fsdp4", settings)
    healed(tmp_path, "fsdp4", settings, doing=dying_twice)
    assert origin(tmp_path).startswith("after step 5, from its local checkpoints")
    found, expected = (figures(folder / "runs" / "one") for folder in (tmp_path, tmp_path / "whole"))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=EXACT)


def test_any_error_of_the_writing_thread_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(local_saves, "write_part", write_part)
    writing = local_saves._Writing(Key(2, "a"), tmp_path / "one", {0: Part(1, {})})
    writing.join()
    assert writing.error == "ValueError"
    assert writing not in local_saves._UNFINISHED


def test_a_run_without_a_shared_checkpoint_can_be_resumed_once_it_is_saved_locally(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no complete checkpoint"):
        Saving().newest(tmp_path, restarted=False)
    (tmp_path / ELSEWHERE).touch()
    assert Saving().newest(tmp_path, restarted=False) is None


def test_a_run_that_continues_from_local_disks_does_not_begin_from_scratch(tmp_path: Path) -> None:
    run = prepare(tiny_config({f"{SECTION}.folder": str(tmp_path)}))
    assert beginning(None, None, run) == "without a shared checkpoint"
    assert beginning(None, None, prepare(tiny_config({}))) == beginning(None, None) == "from scratch"


# What is refused, and what needs no processes.


def test_a_relative_folder_is_refused() -> None:
    with pytest.raises(UsageError, match=r"folder='local' is relative .*; name an absolute path"):
        prepare(tiny_config({f"{SECTION}.folder": "local"}))


def test_one_machine_keeps_no_copy_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SETTINGS, f"{SECTION}.folder": str(tmp_path / "disk"), "trainer.steps": 1}
    train(as_rank(prepare(tiny_config(settings), {}, tmp_path / "run")))
    assert "the run's process runs on one machine, so local checkpoints have no copy" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"peer=true: the run's process runs on one machine"):
        train(as_rank(prepare(tiny_config({**settings, f"{SECTION}.peer": True}), {}, tmp_path / "other")))


def test_machines_keep_copies_in_pairs_and_never_of_themselves() -> None:
    assert keepers(["a"] * 4) == {}
    assert keepers(["a", "a", "b", "b"]) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert keepers(["a", "b", "c"]) == {0: 1, 1: 2, 2: 0}
    assert keepers([*"abcde"]) == {0: 1, 1: 0, 2: 3, 3: 4, 4: 2}
    assert keepers(["a", "b", "a"]) == {0: 1, 2: 1, 1: 0}


def test_a_part_is_read_from_the_disk_of_its_rank_or_from_a_copy() -> None:
    disks = ["x", "x", "y", "y"]
    assert readers({"x": {0, 1, 2, 3}, "y": {2, 3, 0, 1}}, disks, 4) == {0: [0, 2], 1: [1, 3], 2: [2, 0], 3: [3, 1]}
    assert readers({"x": {0, 1, 2, 3}}, disks, 4) == {0: [0], 1: [1], 2: [0], 3: [1]}
    assert readers({"x": {0}}, disks, 2) == {0: [0], 1: []}


def test_a_folder_that_two_machines_see_is_refused() -> None:
    assert refusal([Place("n1", "a", "x"), Place("n2", "b", "y")], "/d") == ""
    assert refusal([Place("n1", "a", "x"), Place("n2", "b", "x")], "/d").startswith(
        "n1 and n2 see the same folder '/d'"
    )
    assert refusal([Place("n1", "a", "x"), Place("n2", "b", error="no")], "/d") == "rank 1 on n2: no"


def test_the_field_that_names_an_unknown_variable_is_named(tmp_path: Path) -> None:
    assert place_of_process("$NO_SUCH/x", None).error == "the environment lacks a variable of folder='$NO_SUCH/x'"
    assert place_of_process(str(tmp_path), "$NO_SUCH").error == "the environment lacks a variable of machine='$NO_SUCH'"
    assert [*tmp_path.iterdir()] == []


def test_a_part_is_read_as_it_was_written_and_damage_is_found(tmp_path: Path) -> None:
    key = Key(3, "abc")
    state = {
        "w/weight": Boxed((4, 2), {(0, 0): torch.ones(2, 2), (2, 1): torch.zeros(1, 1)}),
        "w/step": Boxed((), {(): torch.tensor(5.0)}),
    }
    folder = key.folder(tmp_path)
    write_part(folder, 0, Part(2, state, {"step": 3}, {"loader": {"order": torch.arange(3)}, "samples": 7}))
    assert found_on(tmp_path) == {key: (2, [0])}
    found = read_part(folder, 0)
    assert found.state["w/weight"].parts.keys() == {(0, 0), (2, 1)}
    assert all(
        torch.equal(found.state[name].parts[at], one)
        for name, boxed in state.items()
        for at, one in boxed.parts.items()
    )
    assert found.plain is not None
    assert found.plain["loader"]["order"].tolist() == [0, 1, 2]
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    for number in (9, len(whole) - 1):
        file.write_bytes(whole[:number] + bytes([whole[number] ^ 1]) + whole[number + 1 :])
        with pytest.raises(ValueError, match="has changed since it was saved"):
            read_part(folder, 0)
    file.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="has changed since it was saved"):
        read_part(folder, 0)
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        read_part(folder, 0)
