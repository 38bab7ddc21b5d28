"""What only a GPU can show: the host a step behind the device, and state that is copied from its memory."""

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mplug import Loader, hookimpl
from mplug.errors import Diverged
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.feed import Copies, Feed
from mplug.training.loop import Ending, train
from mplug.training.stepper import DefaultStepper
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.gpu


class Watch:
    """The losses that observers are told of, with the step that was under way meanwhile; calls `at` when one begins."""

    def __init__(self, at: Callable[[Run], None] | None = None) -> None:
        self.at = at
        self.losses: list[float] = []
        self.behind: list[int] = []

    @hookimpl
    def step_started(self, run: Run) -> None:
        if self.at is not None:
            self.at(run)

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.behind.append(run.step - record["step"])


def trained(directory: Path, changes: dict[str, Any], watch: Watch, resume_from: Path | None = None) -> Ending:
    settings = {"trainer.device": "cuda", "trainer.steps": 8, "trainer.eval_every": 0, "checkpoint.every": 4, **changes}
    return train(prepare(tiny_config(settings), {"host/watch": watch}, directory), resume_from)


def saved(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"step_{step:08d}" / "rank00000.safetensors")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_that_is_written_beside_the_training_is_that_of_its_step(tmp_path: Path, precision: str) -> None:
    whole, beside = Watch(), Watch()
    trained(tmp_path / "waiting", {"checkpoint.asynchronous": False, "trainer.precision": precision}, whole)
    trained(tmp_path / "beside", {"trainer.precision": precision}, beside)
    assert beside.losses == whole.losses
    for step in (4, 8):
        one, other = saved(tmp_path / "waiting", step), saved(tmp_path / "beside", step)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    resumed = Watch()
    halfway = tmp_path / "beside" / "checkpoints" / "step_00000004"
    trained(tmp_path / "resumed", {"trainer.precision": precision}, resumed, halfway)
    assert resumed.losses == whole.losses[4:]


def test_a_step_is_told_of_while_the_next_one_runs(tmp_path: Path) -> None:
    watch = Watch()
    trained(tmp_path, {}, watch)
    assert watch.behind == [1, 1, 1, 0, 1, 1, 1, 0], "what is saved was told before"


def test_a_step_that_is_not_finite_changes_no_weight_though_the_next_one_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: list[DefaultStepper] = []
    original = DefaultStepper.update

    def update(self: DefaultStepper, lr: float, weight_decay: float) -> Any:
        if self.run.step == 6:
            self.sinks.arena[3] = math.inf
        steppers.append(self)
        return original(self, lr, weight_decay)

    monkeypatch.setattr(DefaultStepper, "update", update)
    watch = Watch()
    with pytest.raises(Diverged, match="step 6 has a loss of"):
        trained(tmp_path, {"checkpoint.every": 5}, watch)
    assert len(steppers) == 7, "the seventh step was launched"
    assert len(watch.losses) == 5
    before = saved(tmp_path, 5)
    for piece in steppers[-1].pieces:
        parts = [name for name in before if name.startswith(f"{piece.name}/weight@")]
        assert torch.equal(torch.cat([before[name].flatten() for name in parts]).cpu(), piece.master.flatten().cpu())


def test_a_signal_saves_the_step_after_the_one_that_it_came_in(tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)

    assert trained(tmp_path, {}, Watch(stop)) == Ending(None, signal.SIGTERM)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000004"]


# Masks that a kernel draws.


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("backend", "compiler"), [("auto", "never"), ("flash", "never"), ("efficient", "never"), ("auto", "inductor")]
)
def test_masks_of_fused_dropout_are_a_function_of_the_run_alone(tmp_path: Path, backend: str, compiler: str) -> None:
    """Not of what was drawn before, nor of whether backward computes again, nor of a resume."""
    drops = {"model.attention_dropout": 0.125, "trainer.precision": "bf16", "trainer.compile": compiler}
    drops |= {"kernels.sdpa.backend": backend}
    one, other, resumed, none = Watch(), Watch(), Watch(), Watch()
    trained(tmp_path / "one", drops, one)
    torch.cuda.manual_seed(17)
    trained(tmp_path / "other", {**drops, "memory.recompute.mode": "full"}, other)
    trained(tmp_path / "resumed", drops, resumed, tmp_path / "one" / "checkpoints" / "step_00000004")
    trained(tmp_path / "none", {**drops, "model.attention_dropout": 0.0}, none)
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    assert resumed.losses == pytest.approx(one.losses[4:], rel=1e-4)
    assert none.losses != pytest.approx(one.losses, rel=1e-4)


# Nobody waits.


class Strict(Watch):
    """From the third step on until the last is told of, whatever makes the host wait for the GPU raises."""

    def __init__(self) -> None:
        super().__init__(self._begin)
        self.modes: list[int] = []

    def _begin(self, run: Run) -> None:
        if run.step == 3:
            torch.cuda.set_sync_debug_mode("error")
        self.modes.append(torch.cuda.get_sync_debug_mode())

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        super().step_finished(run, record)
        if record["step"] == run.config.trainer.steps:  # a save follows, which waits
            torch.cuda.set_sync_debug_mode("default")


def strictly_trained(directory: Path, text: Path, changes: dict[str, Any]) -> Strict:
    watch = Strict()
    settings = {"data.name": "text", "data.path": str(text), "checkpoint.every": 0, **changes}
    try:
        trained(directory, settings, watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return watch


@pytest.mark.filterwarnings("ignore")  # of the mode itself, and the compiler's own
@pytest.mark.parametrize(
    ("precision", "dropout", "compiler"),
    [("fp32", 0.0, "never"), ("fp32", 0.125, "never"), ("bf16", 0.125, "never"), ("bf16", 0.0, "inductor")],
)
def test_a_step_never_makes_the_host_wait_for_the_gpu(
    tmp_path: Path, text_file: Path, precision: str, dropout: float, compiler: str
) -> None:
    changes = {"trainer.precision": precision, "trainer.compile": compiler}
    changes |= {"model.dropout": dropout, "model.attention_dropout": dropout}
    watch = strictly_trained(tmp_path, text_file, changes)
    assert watch.modes == [0, 0, 2, 2, 2, 2, 2, 2]
    assert len(watch.losses) == 8
    assert watch.behind == [1, 1, 1, 1, 1, 1, 1, 0], "figures were read a step late"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_copy_from_pageable_memory_would_be_seen(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copies, "_copied", lambda _, x: x.to("cuda"))
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        strictly_trained(tmp_path, text_file, {})


class Numbers(Loader):
    """Micro batch n is filled with n: an entry of 8 MiB, and one that is not contiguous."""

    vocab_size = 1 << 20

    def take(self, num_samples: int) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(num_samples):
            tokens = torch.full((1024, 1024), number)
            yield {"tokens": tokens, "labels": tokens[:, 1:], "sample_ids": torch.tensor([number])}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_micro_batches_that_are_dropped_while_the_gpu_is_busy_keep_their_values() -> None:
    work, sums = torch.randn(4096, 4096, device="cuda"), []
    for batch in Feed(Numbers(), "cuda").take(48):
        assert all(entry.is_cuda for entry in batch.values())
        torch.mm(work, work)  # what the sums wait for, and copies do not
        sums.append(torch.stack([batch[name].sum() for name in ("tokens", "labels")]))
        del batch
    expected = [[number * 1024 * 1024, number * 1024 * 1023] for number in range(48)]
    assert torch.stack(sums).tolist() == expected


def test_entries_that_a_loader_puts_on_the_gpu_itself_stay_as_they_are() -> None:
    there = torch.ones(4, device="cuda")
    moved = Copies()({"there": there, "here": torch.ones(4)})
    assert moved["there"] is there
    assert moved["here"].is_cuda


def test_products_of_an_fp32_run_are_fp32s_own_and_not_tf32s(tmp_path: Path) -> None:
    trained(tmp_path, {"trainer.steps": 2}, Watch())
    x, y = torch.randn(2, 512, 512, device="cuda")
    exact = x.double() @ y.double()
    assert float(((x @ y) - exact).norm() / exact.norm()) < 1e-5  # TF32 keeps 11 bits: some 3e-4


def test_gradients_in_bf16_keep_a_run_beside_the_one_with_fp32_gradients(tmp_path: Path) -> None:
    changes = {"trainer.precision": "bf16", "trainer.micro_batch_size": None, "model.tie_embeddings": False}
    rounded, whole = Watch(), Watch()
    trained(tmp_path / "rounded", changes, rounded)
    trained(tmp_path / "whole", {**changes, "trainer.gradients": "masters"}, whole)
    assert rounded.losses != whole.losses
    assert rounded.losses == pytest.approx(whole.losses, rel=1e-3)


def test_rows_are_added_to_a_table_in_the_same_bits_every_time() -> None:
    from mplug_nn import add_rows

    indices = torch.randint(50, (4096,), device="cuda") ** 2 % 50  # some of them often
    rows = torch.randn(4096, 64, device="cuda")
    exact = torch.zeros(50, 64, device="cuda", dtype=torch.float64).index_add_(0, indices, rows.double())
    found = []
    for _ in range(5):
        total, stale = torch.full((50, 64), 7.0, device="cuda"), torch.tensor(True)
        add_rows(total, stale, indices, rows)
        found.append(total)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(found[0], other) for other in found)
