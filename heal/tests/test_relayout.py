"""Changes of the layout of a running run: the same losses, or a refusal after which the run goes on."""

import json
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import mplug.training.assembly
import mplug_heal.live_state
import mplug_heal.relayouts
from mplug import hookimpl
from mplug.errors import UsageError
from mplug.run.metrics_file import METRICS, read_records
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug.training.report import PendingRecord
from mplug_heal.live_state import capture, fill
from mplug_heal.relayouts import Relayouts
from mplug_heal.requests import ANSWER, ask
from mplug_saving.boxes import Boxed, State, held_boxes
from mplug_saving.folder import complete, read_manifest, verify
from mplug_saving.position import Position
from mplug_testing import WorkerFailed, run_workers
from mplug_testing.harness import EXACT, as_rank, tiny_config

STEPS = 8
SETTINGS = {
    "model.num_layers": 4,
    "trainer.steps": STEPS,
    "trainer.eval_every": 4,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "checkpoint.every": 0,
}
Answers = list[tuple[str, str]]
"""The outcome and the sentence of each answer."""


class Asks:
    """On rank 0, asks for a layout at the end of some steps, and keeps the answers."""

    def __init__(self, layouts: Mapping[int, str]) -> None:
        self.layouts, self.answers = layouts, dict[str, tuple[str, str]]()

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        assert run.directory is not None
        if run.rank != 0:
            return
        path = run.directory / ANSWER
        if path.exists():
            answer = json.loads(path.read_text())
            self.answers[answer["number"]] = answer["outcome"], answer["sentence"]
        layout = self.layouts.get(record["step"])
        if layout is not None:
            ask(run.directory, layout)


def nothing(rank: int) -> None:
    """Change nothing in a rank."""


def trained(
    folder: str,
    layout: str,
    requests: Mapping[int, str],
    settings: Mapping[str, Any] = {},
    before: Callable[[int], None] = nothing,
    resume: Path | None = None,
) -> tuple[str, Answers]:
    """Be one rank of a run that is asked for layouts at the end of some steps; (its last layout, the answers)."""
    mplug_heal.relayouts.INTERVAL = 0.0
    config = tiny_config({**SETTINGS, **settings, "parallel.layout": layout})
    asks = Asks(requests)
    run = as_rank(prepare(config, {"host/asks": asks, "host/metrics": MetricsFile()}, Path(folder)))
    before(run.rank)
    train(run, resume)
    return run.config.parallel.layout, [*asks.answers.values()]


def figures(folder: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "tokens", "val_loss")
    return [{name: record[name] for name in names if name in record} for record in read_records(folder / METRICS)]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=EXACT), (name, other["step"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trained(str(folder), "", {})
    return figures(folder)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def test_a_run_that_changes_its_layout_three_times_gives_the_losses_of_one_process(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    results = run_workers(2, trained, str(tmp_path), "dp2", {1: "tp2", 3: "pp2", 5: "fsdp2"})
    assert [layout for layout, _ in results] == ["fsdp2"] * 2
    assert_same(figures(tmp_path), undisturbed)
    changes = record(tmp_path)["relayouts"]
    assert [(one["step"], one["old"], one["new"]) for one in changes] == [
        (2, "dp2", "tp2"),
        (4, "tp2", "pp2"),
        (6, "pp2", "fsdp2"),
    ]
    assert all(one["bytes"] > 0 for one in changes)
    (checkpoint,) = complete(tmp_path / "checkpoints")
    manifest = read_manifest(checkpoint)
    assert manifest["layout"] == record(tmp_path)["layout"] == "fsdp2"
    moved = [change["step"] for change in manifest["changes"] if change["field"] == "parallel.layout"]
    assert moved == [2, 4, 6]


@pytest.mark.wide("relayout")
def test_a_live_change_gives_every_later_step_bit_for_bit_as_a_resume_does(tmp_path: Path) -> None:
    settings = {"trainer.precision": "bf16", "checkpoint.every": 2, "checkpoint.keep": 9}
    live, resumed = tmp_path / "live", tmp_path / "resumed"
    run_workers(2, trained, str(live), "dp2", {1: "tp2"}, settings)
    checkpoint = live / "checkpoints" / "step_00000002"
    assert read_manifest(checkpoint)["layout"] == "dp2"
    run_workers(2, trained, str(resumed), "tp2", {}, settings, nothing, checkpoint)
    assert figures(resumed) == figures(live)[2:]


def test_a_layout_that_does_not_fit_is_refused_and_the_run_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    (layout, answers), _ = run_workers(2, trained, str(tmp_path), "dp2", {1: "tp8", 3: "qq2", 5: "dp2"})
    assert layout == "dp2"
    assert_same(figures(tmp_path), undisturbed)
    assert [outcome for outcome, _ in answers] == ["refused"] * 3
    reasons = [sentence for _, sentence in answers]
    assert "is for 8 ranks, and the run has 2" in reasons[0]
    assert "qq" in reasons[1]
    assert "has the layout 'dp2' already" in reasons[2]
    assert "relayouts" not in record(tmp_path)


def failing_on_rank_1(rank: int) -> None:
    """The first layout that rank 1 builds after its first one does not fit into its memory."""
    original, built = mplug_heal.relayouts.build, list[str]()

    def fails(run: Run) -> Any:
        parts = original(run)
        built.append(run.config.parallel.layout)
        if rank == 1 and len(built) == 1:
            raise torch.OutOfMemoryError("1 GiB is too much")
        return parts

    mplug_heal.relayouts.build = fails


def failing_in_plan(rank: int) -> None:
    """A plugin has a bug under the new layout."""

    def fails(run: Run) -> Any:
        raise ZeroDivisionError("1 GiB is too much")

    mplug_heal.relayouts.build_model = fails


FAILURES = {
    "does not fit into the memory of the GPU: 1 GiB is too much": failing_on_rank_1,
    "fails with ZeroDivisionError: 1 GiB is too much": failing_in_plan,
}


@pytest.mark.wide("relayout", quick=["memory"])
@pytest.mark.parametrize(("reason", "before"), FAILURES.items(), ids=("memory", "bug"))
def test_a_layout_that_a_rank_cannot_build_is_refused_and_the_run_goes_on_under_the_old_one(
    tmp_path: Path, undisturbed: list[dict[str, float]], reason: str, before: Callable[[int], None]
) -> None:
    (layout, answers), _ = run_workers(2, trained, str(tmp_path), "dp2", {2: "tp2"}, {}, before)
    assert layout == "dp2"
    assert_same(figures(tmp_path), undisturbed)
    assert [outcome for outcome, _ in answers] == ["refused"]
    assert reason in answers[0][1]
    assert "relayouts" not in record(tmp_path)


def refusing_to_continue(rank: int) -> None:
    """The loader of rank 1 cannot continue under the new layout."""
    original = Position.load_plain

    def fails(self: Position, *arguments: Any) -> None:
        if rank == 1 and self.run.config.parallel.layout == "tp2":
            raise UsageError("the loader counts other parts")
        original(self, *arguments)

    Position.load_plain = fails  # type: ignore[assignment,method-assign]


@pytest.mark.wide("relayout")
def test_a_loader_that_cannot_continue_under_the_new_layout_leaves_the_run_under_the_old_one(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    results = run_workers(2, trained, str(tmp_path), "dp2", {2: "tp2"}, {}, refusing_to_continue)
    assert results == [("dp2", [("refused", "the loader counts other parts")]), ("dp2", [])]
    assert_same(figures(tmp_path), undisturbed)


def failing_within_build(rank: int) -> None:
    """Rank 1 has no memory for the new layout, and rank 0 waits for it within its build."""
    original, allocated = mplug.training.assembly._allocate, list[int]()
    mplug_heal.relayouts.PATIENCE = timedelta(seconds=2)

    def fails(run: Run, model: Any) -> None:
        allocated.append(rank)
        if rank == 1 and len(allocated) == 2:
            raise torch.OutOfMemoryError("1 GiB is too much")
        original(run, model)

    mplug.training.assembly._allocate = fails


@pytest.mark.wide("relayout")
def test_a_rank_that_fails_while_others_wait_in_their_build_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="not all ranks can go on: the new layout does not fit into the memory"):
        run_workers(2, trained, str(tmp_path), "dp2", {2: "tp2"}, {}, failing_within_build, timeout=60)


# GPUs, watchers.


def trained_like_on_a_gpu(folder: str) -> tuple[str, Answers]:
    """Be one rank whose CPU reads the figures of a step when the next one is launched."""
    PendingRecord.ready = False  # type: ignore[assignment]
    looks = iter([False, False, False, True])  # a step later, it is too early to look again
    Relayouts.is_requested = lambda *_: next(looks, False)  # type: ignore[method-assign]
    return trained(folder, "dp2", {2: "tp2"}, {"trainer.eval_every": 0})


@pytest.mark.wide("relayout")
def test_a_request_is_served_if_its_step_is_read_after_the_next_one_has_begun(tmp_path: Path) -> None:
    results = run_workers(2, trained_like_on_a_gpu, str(tmp_path))
    assert [layout for layout, _ in results] == ["tp2", "tp2"]


def trained_with_watchers(folder: str) -> bool:
    """Be one rank whose extensions look at the model; whether the old one is free before the new one is built."""
    original, free = mplug_heal.relayouts._release, list[bool]()

    def release(run: Run, position: Position) -> None:
        module = weakref.ref(position.parts.model.module)
        original(run, position)
        free.append(module() is None)

    mplug_heal.relayouts._release = release
    watchers = {"corruption": {"every": 1}, "nanwatch": {}, "stragglers": {"every": 1}, "gc": {"every": 1}}
    trained(folder, "dp2", {2: "tp2"}, {f"extensions.{name}": fields for name, fields in watchers.items()})
    return free == [True]


@pytest.mark.wide("relayout")
def test_extensions_that_watch_a_model_keep_nothing_of_it_when_its_layout_changes(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    assert run_workers(2, trained_with_watchers, str(tmp_path)) == [True, True]
    assert_same(figures(tmp_path), undisturbed)
    assert all(record["corrupted_copies"] == 0 for record in read_records(tmp_path / METRICS)[2:])


# The messages.


def copies_of(state: State) -> State:
    return {
        name: Boxed(boxed.shape, {start: torch.full_like(part, -1) for start, part in boxed.parts.items()})
        for name, boxed in state.items()
    }


def filled_in_portions(old: str, new: str, limit: int) -> tuple[list[str], int, int, int]:
    """Be one rank: the tensors that differ from those of one big message, the largest message, and received bytes."""
    position = position_under(old)
    live = capture(position.run, position)
    wanted = position_under(new).state(held_boxes)
    whole, portions = copies_of(wanted), copies_of(wanted)
    total = fill(position.run, live, whole)
    sizes, transfer = [0], mplug_heal.live_state._transfer

    def watched(sent: Mapping[int, torch.Tensor], taken: Mapping[int, torch.Tensor], *group: Any) -> None:
        if not group:  # the requests have a group of their own
            sizes.append(max(sum(one.numel() for one in messages.values()) for messages in (sent, taken)))
        transfer(sent, taken, *group)

    mplug_heal.live_state._transfer = watched
    received = fill(position.run, live, portions, limit)
    different = [
        name
        for name, boxed in whole.items()
        if any(not torch.equal(part, portions[name].parts[start]) for start, part in boxed.parts.items())
        or any((part == -1).all() for part in boxed.parts.values())
    ]
    return different, max(sizes), received, total


def position_under(layout: str) -> Position:
    run = as_rank(prepare(tiny_config({**SETTINGS, "parallel.layout": layout, "optimizer.name": "adamw"})))
    return Position(run, build(run))


@pytest.mark.wide("relayout")
def test_portions_of_at_most_1000_bytes_fill_the_same_parts_as_one_message() -> None:
    for different, largest, received, total in run_workers(4, filled_in_portions, "dp2tp2", "pp4", 1000):
        assert different == []
        assert 0 < largest <= 1000
        assert received == total > 20 * largest


# Kills.


def killed_in(stage: str, rank: int) -> None:
    """Rank 1 dies when it begins a stage of the change of the layout."""
    if rank == 1:

        def die(*_: object, **__: object) -> None:
            os._exit(9)

        module = mplug_heal.live_state if stage == "_exchange" else mplug_heal.relayouts
        setattr(module, stage, die)


def killed_in_capture(rank: int) -> None:
    killed_in("capture", rank)


def killed_in_build(rank: int) -> None:
    killed_in("build", rank)


def killed_in_exchange(rank: int) -> None:
    killed_in("_exchange", rank)


def killed_in_record(rank: int) -> None:
    killed_in("record_change", rank)


STAGES = [
    pytest.param(killed_in_exchange, id="exchange"),
    *(
        pytest.param(stage, id=name, marks=pytest.mark.wide("relayout"))
        for name, stage in (("capture", killed_in_capture), ("build", killed_in_build), ("record", killed_in_record))
    ),
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_while_it_changes_its_layout_resumes_from_its_checkpoint(
    tmp_path: Path, undisturbed: list[dict[str, float]], stage: Callable[[int], None]
) -> None:
    with pytest.raises(WorkerFailed, match="rank 1"):
        run_workers(2, trained, str(tmp_path), "dp2", {2: "tp2"}, {"checkpoint.every": 2}, stage, timeout=60)
    (checkpoint,) = complete(tmp_path / "checkpoints")
    assert checkpoint.name == "step_00000002"
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest, manifest["files"])
    assert not (tmp_path / "relayout.json").exists(), "a restarted run would try again"
    trained(str(tmp_path), "", {}, {}, nothing, checkpoint)
    assert_same(figures(tmp_path), undisturbed)


def test_a_request_that_is_no_request_is_removed_and_the_run_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    (tmp_path / "relayout.json").write_text('["tp2"]')
    layout, answers = trained(str(tmp_path), "", {})
    assert (layout, answers) == ("", [])
    assert_same(figures(tmp_path), undisturbed)


def test_a_second_request_is_refused_as_long_as_the_first_one_waits(tmp_path: Path) -> None:
    ask(tmp_path, "tp2")
    with pytest.raises(UsageError, match="has a request for another layout already"):
        ask(tmp_path, "dp2")
