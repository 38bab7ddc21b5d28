"""A process of a run dies, at any moment: the run goes on in the others, with the losses of an undisturbed run."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mplug_heal.copies
import mplug_heal.relayouts
from mplug.config.sources import Settings
from mplug.distributed.supervision import Send
from mplug.distributed.world import World, attempt
from mplug.errors import RunError, UsageError
from mplug.run.launching import Healing, Stopped, launch
from mplug.run.metrics_file import METRICS, read_records
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.healing import healer_of
from mplug.training.job import Job, Outcome, supervisor_of, work
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug.training.stepper import DefaultStepper
from mplug_heal.copies import Copying, _newest_complete, restore
from mplug_heal.keepers import covers, keeper
from mplug_heal.requests import ask
from mplug_launch.survivors import launch_survivors
from mplug_saving import storage
from mplug_saving.folder import complete, read_manifest, verify
from mplug_saving.position import Position
from mplug_saving.saver import Saver
from mplug_steps.reduction import Reduction
from mplug_testing.harness import EXACT, as_rank, overrides_of, tiny_config, tiny_run, tiny_settings

STEPS = 6
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "trainer.device": "cpu",
    "checkpoint.every": 3,
    "extensions.heal.every": 2,
}
Death = tuple[int, int, str]
"""The step in which a process dies, its rank, and the moment."""


def overrides(settings: dict[str, Any]) -> Settings:
    return overrides_of({**SETTINGS, **settings})


def dying(job: Job, deaths: tuple[Death, ...], send: Send) -> Outcome:
    """The work of a process of a run; in the n-th attempt, the n-th death takes place."""
    if attempt() < len(deaths):
        step, rank, moment = deaths[attempt()]
        if rank == int(os.environ["RANK"]):
            PREPARED[moment](step)
    return work(job, send)


def _dies_before(owner: Any, name: str, step_of: Callable[[Any], int], step: int, by: int = signal.SIGKILL) -> None:
    method = getattr(owner, name)

    def replaced(self: Any, *arguments: Any, **named: Any) -> Any:
        if step_of(self) == step:
            os.kill(os.getpid(), by)
        return method(self, *arguments, **named)

    setattr(owner, name, replaced)


def writing_slowly(job: Job, deaths: tuple[Death, ...], send: Send) -> Outcome:
    """As `dying`; in the first attempt, rank 0 needs seconds to write the checkpoint of step 3."""
    write, is_slow = storage.save_file, attempt() == 0 and os.environ["RANK"] == "0"

    def save_file(tensors: Any, path: Path) -> None:
        if is_slow and "step_00000003" in str(path):
            time.sleep(4)
        write(tensors, path)

    storage.save_file = save_file
    return dying(job, deaths, send)


def _step(of: Any) -> int:
    return int(of.run.step)


def _dies_copying(step: int) -> None:
    """Die in a copy of the state, after the parts are copied and before the ranks have agreed on it."""
    _dies_before(mplug_heal.copies.Copying, "_backed", lambda _: STEP[0], step)
    _dies_before(DefaultStepper, "update", lambda stepper: STEP.__setitem__(0, stepper.run.step) or 0, -1)


def _raises(step: int) -> None:
    method = DefaultStepper.update

    def update(self: DefaultStepper, lr: float, weight_decay: float) -> Any:
        if self.run.step == step:
            raise ValueError("a fault of its own")
        return method(self, lr, weight_decay)

    DefaultStepper.update = update  # type: ignore[method-assign]


def _asks_and_dies(step: int) -> None:
    """Ask for another layout two steps before, and die under it."""
    apply, mplug_heal.relayouts.INTERVAL = DefaultStepper.apply, 0.0

    def asking(self: DefaultStepper, *arguments: Any) -> Any:
        if self.run.step == step - 2:
            assert self.run.directory is not None
            ask(self.run.directory, "fsdp2")
        if self.run.step == step:
            assert self.run.config.parallel.layout == "fsdp2"
            os.kill(os.getpid(), signal.SIGKILL)
        return apply(self, *arguments)

    DefaultStepper.apply = asking  # type: ignore[method-assign]


STEP = [0]
PREPARED: dict[str, Callable[[int], None]] = {
    "forward": lambda step: _dies_before(DefaultStepper, "entries", _step, step),
    "backward": lambda step: _dies_before(DefaultStepper, "loss_gradient", _step, step),
    "reduction": lambda step: _dies_before(Reduction, "finish", lambda one: one.run.step, step),
    "update": lambda step: _dies_before(DefaultStepper, "apply", _step, step),
    "save": lambda step: _dies_before(Saver, "save", _step, step),
    "copy": _dies_copying,
    "relayout": _asks_and_dies,
    "error": _raises,
    "stop": lambda step: _dies_before(DefaultStepper, "apply", _step, step, signal.SIGSTOP),
}


def healed(
    folder: Path, layout: str, settings: dict[str, Any], *deaths: Death, doing: Callable[..., Outcome] = dying
) -> Outcome:
    job = Job(tiny_settings(), overrides({**settings, "parallel.layout": layout}), folder / "runs" / "one", None)
    run = prepare(tiny_config({**SETTINGS, **settings, "parallel.layout": layout}))
    healer = healer_of(run)
    assert healer is not None
    healing = healer.plan(run, None, job.base, job.overrides)
    job = Job(job.base, job.overrides, job.directory, None, layouts=healing.layouts)
    found: Outcome = launch(run.mesh.world_size, doing, job, deaths, supervisor=supervisor_of(run), healing=healing)
    return found


def figures(folder: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "tokens", "val_loss")
    return [{name: record[name] for name in names if name in record} for record in read_records(folder / METRICS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("extensions")}
    train(as_rank(prepare(tiny_config(settings), {"host/metrics": MetricsFile()}, folder)))
    return figures(folder)


def assert_same(folder: Path, expected: list[dict[str, float]]) -> None:
    found = figures(folder / "runs" / "one")
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=EXACT)
    assert [path.name for path in complete(folder / "runs" / "one" / "checkpoints")][-1] == f"step_{STEPS:08}"


def continued_after(folder: Path) -> list[int]:
    """The steps after which rank 0 has continued from copies."""
    text = (folder / "runs" / "one" / "logs" / "rank0.log").read_text()
    return [int(step) for step in re.findall(r"the run continues after step (\d+), from the copies", text)]


def test_a_run_goes_on_with_fewer_ranks_after_a_death_in_an_update(
    tmp_path: Path, undisturbed: list[dict[str, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy precedes each save, so the run repeats no step that a checkpoint has, however rare copies are."""
    healed(tmp_path, "dp2", {"extensions.heal.every": 5}, (5, 0, "update"))
    assert_same(tmp_path, undisturbed)
    sentence = "in step 5, died of SIGKILL; the run goes on in 1 process\n"
    assert re.search(rf"^mplug: rank 0 on \S+, {sentence}", capfd.readouterr().err, re.MULTILINE)
    assert continued_after(tmp_path) == [3]


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


FEATURES: dict[str, dict[str, Any]] = {
    "a growing batch": {"schedule.batch_rampup": {"start": 4, "increment": 4, "samples": 12}},
    "asynchronous saves of all steps": {"checkpoint.asynchronous": True, "checkpoint.every": 1},
    "measured intervals": {"checkpoint.every": "auto", "extensions.heal.every": "auto"},
    "evaluations": {"trainer.eval_every": 2},
    "a loss scale": {"trainer.precision": "fp16"},
}
"""Features that the pairs of tests/test_pairs.py lack."""


@pytest.mark.wide("kills")
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_with_a_feature_goes_on_as_if_no_process_had_died(tmp_path: Path, feature: str, spares: int) -> None:
    """It is compared with a run without a death under the same layout; in fp16, sums of fewer ranks round otherwise."""
    settings = {**FEATURES[feature], "extensions.heal.spares": spares}
    healed(tmp_path / "whole", "dp2", settings)
    healed(tmp_path / "healed", "dp2", settings, (5, 1, "backward"))
    found, expected = (figures(tmp_path / name / "runs" / "one") for name in ("healed", "whole"))
    bound = 1e-2 if feature == "a loss scale" and not spares else EXACT
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=bound)
    assert continued_after(tmp_path / "healed") != []


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


@pytest.mark.parametrize(
    ("layout", "settings", "reason"),
    [
        ("", {}, "a run of one process"),
        ("dp2", {"parallel.read_once": True}, "parallel.read_once=false"),
        ("fsdp2", {"parallel.fsdp.transport": "copy_engines"}, r"signals between GPUs.*\(extensions/heal\)"),
        ("fsdp2", {"parallel.fsdp.sum_transport": "copy_engines"}, "set transport and sum_transport to messages"),
        ("dp2cp2", {"parallel.cp.method": "ulysses", **COPIES}, "use parallel.cp.transport=messages, or leave"),
    ],
)
def test_what_cannot_be_healed_is_refused(layout: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        layouts_of(layout, **settings)


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


def test_a_signal_ends_a_run_that_goes_on_after_a_death_before_its_next_step() -> None:
    """Its processes may be between two attempts, where no step hears a signal: it must not be lost."""
    began = time.monotonic()
    with pytest.raises(Stopped) as stop:
        launch_survivors(2, _stopped_while_it_goes_on, (os.getpid(),), None, None, Healing(0, {1: {}}, covers, print))
    assert stop.value.signal == signal.SIGINT
    assert time.monotonic() - began < 40
