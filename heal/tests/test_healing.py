"""A process of a run dies, at any moment: the run goes on in the others, with the losses of an undisturbed run."""

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deaths import (
    PREPARED,
    SETTINGS,
    STEPS,
    assert_figures,
    continued_after,
    figures_of_one_process,
    healed,
    overrides,
    writing_slowly,
)
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mplug.distributed.world import World
from mplug.errors import RunError, UsageError
from mplug.gradients.sinks import GradientSink
from mplug.run.launching import Healing, Stopped
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.healing import healer_of
from mplug.training.loop import train
from mplug_heal.copies import Copying, _newest_complete, restore
from mplug_heal.keepers import covers, keeper
from mplug_heal.smaller import refuse_meeting_again
from mplug_launch.store_connections import end_waits
from mplug_launch.surviving import GiveUp, Inbox, Left, Membership, collect_all, keep_modules
from mplug_launch.survivors import Crew, launch_survivors
from mplug_saving.folder import complete, read_manifest, verify
from mplug_saving.position import Position
from mplug_saving.saver import Saver
from mplug_testing.harness import as_rank, tiny_config, tiny_run, tiny_settings


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The steps of one process."""
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("extensions")}
    return figures_of_one_process(tmp_path_factory.mktemp("undisturbed"), settings)


def assert_same(folder: Path, expected: list[dict[str, float]]) -> None:
    assert_figures(folder, expected, STEPS)
    assert [path.name for path in complete(folder / "runs" / "one" / "checkpoints")][-1] == f"step_{STEPS:08}"


def test_a_run_goes_on_with_fewer_ranks_after_a_death_in_an_update(
    tmp_path: Path, undisturbed: list[dict[str, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy precedes each save, so the run repeats no step that a checkpoint has, however rare copies are."""
    healed(tmp_path, "dp2", {"extensions.heal.every": 5}, (5, 0, "update"))
    assert_same(tmp_path, undisturbed)
    sentence = "in step 5, died of SIGKILL; the run goes on in 1 process\n"
    assert re.search(rf"^mplug: rank 0 on \S+, {sentence}", capfd.readouterr().err, re.MULTILINE)
    assert continued_after(tmp_path) == [3]


def test_a_run_that_ends_while_its_last_step_is_saved_repeats_the_step_and_saves_it(tmp_path: Path) -> None:
    settings = {**SETTINGS, "extensions.heal.every": 5}

    def prepared() -> Run:
        return as_rank(prepare(tiny_config(settings), {}, tmp_path))

    first, save = prepared(), Saver.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", lambda self, *of: save(self, *of) if self.run.step < STEPS else _died())
        with pytest.raises(RunError, match="a process has died"):
            train(first)
    second = prepared()
    second.kept = first.kept
    assert train(second).val_loss is not None
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_00000003", "step_00000006"]


def _died() -> None:
    raise RunError("a process has died")


@pytest.mark.wide("kills")
def test_a_death_in_the_last_save(tmp_path: Path, undisturbed: list[dict[str, float]]) -> None:
    healed(tmp_path, "dp2", {"extensions.heal.every": 5}, (STEPS, 0, "save"))
    assert_same(tmp_path, undisturbed)
    assert continued_after(tmp_path) == [3]


@pytest.mark.wide("kills")
def test_a_spare_process_replaces_one_whose_shards_no_replica_holds(
    tmp_path: Path, undisturbed: list[dict[str, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    healed(tmp_path, "tp2", {"extensions.heal.spares": 1}, (5, 1, "backward"))
    assert_same(tmp_path, undisturbed)
    sentence = "in step 5, died of SIGKILL; the run goes on in 2 processes, with 1 spare process\n"
    assert re.search(rf"^mplug: rank 1 on \S+, {sentence}", capfd.readouterr().err, re.MULTILINE)
    assert continued_after(tmp_path) == [3]


@pytest.mark.wide("kills")
@pytest.mark.parametrize("moment", [name for name in PREPARED if name not in ("error", "relayout", "stop")])
@pytest.mark.parametrize(
    ("layout", "spares", "rank"), [("dp2tp2", 0, 1), ("fsdp4", 0, 2), ("zero2tp2", 1, 0), ("dp2pp2", 0, 3)]
)
def test_a_death_at_any_moment_of_a_step_loses_nothing(
    tmp_path: Path, undisturbed: list[dict[str, float]], layout: str, spares: int, rank: int, moment: str
) -> None:
    step, last_copy = {"save": (3, 3), "copy": (3, 2)}.get(moment, (5, 3))
    healed(tmp_path, layout, {"extensions.heal.spares": spares}, (step, rank, moment))
    assert continued_after(tmp_path) == [last_copy]
    assert_same(tmp_path, undisturbed)


@pytest.mark.wide("kills")
def test_a_death_while_a_checkpoint_is_written(tmp_path: Path, undisturbed: list[dict[str, float]]) -> None:
    """The threads that write wait for each other, and for the dead rank; the step is saved again soon."""
    healed(tmp_path, "fsdp4", {"extensions.heal.spares": 1}, (4, 2, "update"), doing=writing_slowly)
    assert continued_after(tmp_path) == [3]
    assert_same(tmp_path, undisturbed)
    for path in complete(tmp_path / "runs" / "one" / "checkpoints"):
        manifest = read_manifest(path)
        verify(path, manifest, manifest["files"])


@pytest.mark.wide("kills")
def test_three_deaths_one_after_the_other(tmp_path: Path, undisturbed: list[dict[str, float]]) -> None:
    deaths = (2, 0, "update"), (4, 1, "reduction"), (5, 1, "forward")
    healed(tmp_path, "dp4", {"extensions.heal.spares": 1, "extensions.heal.every": 1}, *deaths)
    assert_same(tmp_path, undisturbed)
    assert continued_after(tmp_path) == [1, 3, 4]


@pytest.mark.wide("kills")
def test_a_process_that_hangs_is_named_killed_and_replaced(
    tmp_path: Path, undisturbed: list[dict[str, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    healed(tmp_path, "fsdp2", {"extensions.heal.spares": 1, "extensions.watchdog.timeout": 3.0}, (5, 0, "stop"))
    assert_same(tmp_path, undisturbed)
    printed = capfd.readouterr().err
    assert re.search(r"^mplug: rank 0 on \S+, last seen in step 5, stopped sending heartbeats", printed, re.MULTILINE)
    assert "the run goes on in 2 processes, with 1 spare process\n" in printed


@pytest.mark.wide("kills")
def test_a_run_changes_its_layout_and_goes_on_after_a_death(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    asking = {"extensions.heal.spares": 1, "extensions.heal.every": 1}
    healed(tmp_path, "dp2", asking, (5, 0, "relayout"))
    assert_same(tmp_path, undisturbed)
    assert continued_after(tmp_path) == [4]


@pytest.mark.wide("kills")
def test_a_run_goes_on_after_a_death_changes_its_layout_and_goes_on_after_another_death(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    settings = {"extensions.heal.spares": 2, "extensions.heal.every": 1}
    healed(tmp_path, "dp2", settings, (2, 1, "update"), (5, 0, "relayout"))
    assert_same(tmp_path, undisturbed)
    assert continued_after(tmp_path) == [1, 4]


@pytest.mark.wide("kills")
def test_a_run_without_a_process_to_go_on_in_ends_with_the_sentence_of_the_death(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 0 on .*, in step 3, died of SIGKILL"):
        healed(tmp_path, "tp2", {"extensions.heal.spares": 1}, (2, 1, "update"), (3, 0, "update"))


@pytest.mark.wide("kills")
def test_an_error_of_a_process_that_lives_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 0 on .*, in step 2, failed with ValueError: a fault of its own"):
        healed(tmp_path, "dp2", {}, (2, 0, "error"))


# What is refused before launch, and what is computed from ranks alone.


def run_of(layout: str, **settings: Any) -> Run:
    return prepare(tiny_config({**SETTINGS, **settings, "parallel.layout": layout}))


def layouts_of(layout: str, **settings: Any) -> dict[int, str]:
    run = run_of(layout, **settings)
    healer = healer_of(run)
    assert healer is not None
    base = tiny_settings()
    healing = healer.plan(run, None, base, overrides({**settings, "parallel.layout": layout}))
    return {size: settings["parallel", "layout"].value for size, settings in healing.layouts.items()}


def test_only_the_degree_of_data_parallelism_becomes_smaller() -> None:
    assert layouts_of("dp4tp2") == {4: "dp2tp2", 2: "tp2"}
    assert layouts_of("dp4", **{"trainer.global_batch_size": 12, "trainer.micro_batch_size": 3}) == {
        3: "dp3",
        2: "dp2",
        1: "",
    }
    assert layouts_of("fsdp3", **{"trainer.global_batch_size": 6}) == {2: "fsdp2", 1: ""}


def test_a_layout_that_cannot_become_smaller_needs_a_spare_process() -> None:
    with pytest.raises(UsageError, match=r"layout 'tp2' cannot go on with fewer processes, .*heal.spares=1"):
        layouts_of("tp2")
    assert layouts_of("tp2", **{"extensions.heal.spares": 1}) == {}


COPIES = {"parallel.cp.transport": "copy_engines"}
GPUS = {"trainer.device": "cuda"}


@pytest.mark.parametrize(
    ("layout", "settings", "reason"),
    [
        ("", {}, "a run of one process"),
        ("dp2", {"parallel.read_once": True}, "parallel.read_once=false"),
        (
            "dp4",
            GPUS,
            r"meet again .* SIGSEGV.* this run has 4 and 0 spare; .* use --restarts \(with extensions.local_ch",
        ),
        ("dp2", {**GPUS, "extensions.heal.spares": 1}, "this run has 2 and 1 spare"),
        ("fsdp2", {"parallel.fsdp.transport": "copy_engines"}, r"signals between GPUs.*\(extensions/heal\)"),
        ("fsdp2", {"parallel.fsdp.sum_transport": "copy_engines"}, "set transport and sum_transport to messages"),
        ("dp2cp2", {"parallel.cp.method": "ulysses", **COPIES}, "use parallel.cp.transport=messages, or leave"),
    ],
)
def test_what_cannot_be_healed_is_refused(layout: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        layouts_of(layout, **settings)


def test_two_processes_on_gpus_go_on_in_one() -> None:
    refuse_meeting_again(run_of("fsdp2", **GPUS), spares=0)


def test_a_run_that_deaths_have_left_in_one_process_resumes_in_it() -> None:
    """Its saved config names the extension and the layout that remains."""
    run = run_of("")
    base = tiny_settings() | overrides({"extensions.heal.fewer": True})
    assert healer_of(run).plan(run, None, base, {}).layouts == {}  # type: ignore[union-attr]


def test_true_in_the_place_of_the_section_names_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"not True; for the plugin with its defaults, set extensions.heal=\{\}"):
        tiny_config({"extensions.heal": True})


def test_another_launcher_is_refused() -> None:
    run = run_of("dp2")
    with pytest.raises(UsageError, match="torchrun ends all processes of a run when one dies"):
        healer_of(run).plan(run, World(0, 2, 0, "torchrun"), {}, {})  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_the_state_outlives_any_one_rank(size: int) -> None:
    assert sorted(keeper(rank, size) for rank in range(size)) == [*range(size)]
    for dead in range(size if size > 1 else 0):
        assert covers(set(range(size)) - {dead}, size)
    if size > 1:
        assert not covers(set(range(size)) - {0, keeper(0, size)}, size)


def test_a_run_forgets_all_generations_but_the_one_from_which_it_goes_on() -> None:
    """The next copy replaces the older of two. A process may hold a newer one that is not complete."""
    run = tiny_run(SETTINGS)
    position, copying = Position(run, build(run)), Copying(1, None)
    for run.step in (1, 2):
        copying.keep(run, position)
    newest = run.kept["heal"][-1]
    run.kept["heal"].append(replace(newest, key=(3, 0), size=2))
    assert restore(run, position, Copying(1, None))
    assert run.step == 2
    assert run.kept["heal"] == [newest]


def test_the_newest_generation_that_the_processes_hold_completely_is_chosen() -> None:
    newer, older = (4, 0), (2, 0)
    half, other = (2, [0]), (2, [1])
    assert _newest_complete([{older: half, newer: half}, {older: other, newer: other}]) == (newer, {0: 0, 1: 1})
    assert _newest_complete([{older: half, newer: half}, {older: other}]) == (older, {0: 0, 1: 1})
    assert _newest_complete([{newer: half}, {older: other}]) is None
    assert _newest_complete([{}, {}]) is None


def test_what_is_garbage_before_a_run_is_freed_before_the_modules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that `gc.freeze` keeps is never freed: the rehearsed model is one."""
    cycle, lives = Copying(1, None), list[bool]()
    cycle._parts = cycle.__repr__
    seen = weakref.ref(cycle)
    del cycle
    monkeypatch.setattr(gc, "freeze", lambda: lives.append(seen() is not None))
    keep_modules()
    assert lives == [False]


class _Stage:
    """A stage of a pipeline whose rank has left its work before the backward pass."""

    def __init__(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        self.sink = GradientSink("w", parameter, torch.zeros(2))
        self.waiting, self.own = get_gradient_edge((2 * parameter).sum()), self


def test_a_process_that_has_left_its_work_before_a_backward_pass_keeps_nothing_of_it() -> None:
    """The sinks' listeners hold process groups, whose connections would stay open: other ranks waited for minutes."""
    sink = weakref.ref(_Stage().sink)
    collect_all()
    assert sink() is None


def test_processes_that_have_all_left_their_work_give_up_at_once_and_do_not_hang() -> None:
    """They send no heartbeats then. None of them has died, so none waits for another attempt."""
    crew = Crew(2, 0, None, Healing(0, {1: {}}, covers, print))
    sent: SimpleQueue[object] = SimpleQueue()
    inbox, looks = Inbox(SimpleNamespace(recv=sent.get)), list[float]()  # type: ignore[arg-type]
    crew.monitor = SimpleNamespace(hang=looks.append)  # type: ignore[assignment]
    crew.end_hang()
    crew.hears(0, Left(crew.attempt))
    crew.end_hang()
    assert len(looks) == 1
    assert not crew.child_ends[1].poll()
    crew.hears(1, Left(crew.attempt))
    sent.put(crew.child_ends[1].recv())
    crew.close()
    began = time.monotonic()
    assert inbox.take(60.0) is None
    assert time.monotonic() - began < 30


def test_a_process_that_was_to_give_up_waits_again_in_the_attempt_after_a_death() -> None:
    """It has died while the others gave up, so the launcher has sent a membership after all."""
    sent: SimpleQueue[object] = SimpleQueue()
    inbox = Inbox(SimpleNamespace(recv=sent.get))  # type: ignore[arg-type]
    sent.put(GiveUp())
    assert inbox.take(60.0) is None
    membership = Membership(attempt=0, rank=1, size=2, port=0, gpu=1)
    sent.put(membership)
    while inbox.take(0.01) is not membership:
        pass
    began = time.monotonic()
    assert inbox.take(0.1) is None
    assert time.monotonic() - began >= 0.1


def _stopped_while_it_goes_on(launcher: int, send: Callable[[object], None]) -> None:
    """Rank 1 dies in its first step. The other begins again, and the launcher gets a signal that it does not hear."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        send(1)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the connection is closed")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(launcher, signal.SIGINT)
    time.sleep(60)


@pytest.mark.wide("kills")
def test_a_signal_ends_a_run_that_goes_on_after_a_death_before_its_next_step() -> None:
    """Its processes may be between two attempts, where no step hears a signal: it must not be lost."""
    began = time.monotonic()
    with pytest.raises(Stopped) as stop:
        launch_survivors(2, _stopped_while_it_goes_on, (os.getpid(),), None, None, Healing(0, {1: {}}, covers, print))
    assert stop.value.signal == signal.SIGINT
    assert time.monotonic() - began < 40


def test_a_process_that_waits_at_the_store_for_a_dead_one_is_woken() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = TCPStore("127.0.0.1", store.port, is_master=False)
    failures: list[str] = []

    def wait() -> None:
        try:
            waiting.wait(["member_1"], timedelta(seconds=30))
        except RuntimeError as error:
            failures.append(str(error))

    num_open = len(os.listdir("/dev/fd"))
    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:  # as long as it has not left its work
        end_waits(store.port)
        thread.join(0.05)
    assert failures
    assert "imeout" not in failures[0]
    assert len(os.listdir("/dev/fd")) <= num_open
