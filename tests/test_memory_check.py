"""The estimate of a run's memory is near the truth, and a run that surely does not fit is refused before it starts."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mplug import Run, UsageError
from mplug.distributed.world import World
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug.training.loop import launch_step
from mplug_estimates import memory_check
from mplug_estimates.activations import Activations, estimate_activations
from mplug_estimates.memory_check import check_memory, needed
from mplug_estimates.memory_limits import HostMemory, host_memory
from mplug_testing.harness import tiny_run
from mplug_testing.memory import kept_bytes

SIZES: dict[str, Any] = {"model.hidden_size": 64, "trainer.seq_length": 128, "trainer.micro_batch_size": 2}
FULL = {"memory.recompute.mode": "full"}
REFERENCE = {"kernels.attention": "reference"}


def sized(**changes: Any) -> Run:
    return tiny_run({**SIZES, **{name.replace("__", "."): value for name, value in changes.items()}})


def estimated(**changes: Any) -> list[Activations]:
    run = sized(**changes)
    return estimate_activations(run, build_model(run))


@pytest.mark.parametrize(
    "changes",
    [{}, {"trainer.precision": "bf16"}, REFERENCE, FULL, {"model.activation": "swiglu"}, {"model.frozen": ["blocks"]}],
    ids=str,
)
def test_the_estimate_is_near_what_autograd_keeps(changes: dict[str, Any]) -> None:
    """A single process counts what autograd saves; docs/memory.md states the error at other sizes."""
    (found,) = estimated(**changes)
    run = sized(**changes)
    kept = kept_bytes(run, build(run))
    assert 0.6 < found.kept.all / kept < 1.6
    assert found.certain < kept


def test_a_layout_divides_activations_as_it_divides_the_work() -> None:
    (whole,) = estimated()
    for layout in ("cp2", "tp2"):
        (part,) = estimated(parallel__layout=layout)
        assert part.kept.all == pytest.approx(whole.kept.all / 2, rel=0.1), layout


def test_a_stage_holds_the_micro_batches_that_its_schedule_has_in_flight() -> None:
    first, last = estimated(parallel__layout="pp2", trainer__micro_batch_size=2)
    assert (first.in_flight, last.in_flight) == (2, 1)
    (whole,) = estimated()
    assert first.kept.all + 2 * last.kept.all == pytest.approx(2 * whole.kept.all, rel=1e-6)


def test_scores_count_where_a_kernel_keeps_them() -> None:
    (fused,), (plain,) = estimated(), estimated(**REFERENCE)
    scores = 4 * 4 * 2 * 128 * 128  # bytes of fp32, heads, samples, pairs
    assert fused.kept.pairs == 0
    assert plain.kept.pairs == 4 * 2 * scores  # layers; scores and their softmax
    selective = {"memory.recompute.mode": "selective"}
    assert estimated(**REFERENCE, **selective)[0].kept.pairs == 0


def checked(monkeypatch: pytest.MonkeyPatch, gib: float, changes: Any = MappingProxyType({}), **more: Any) -> list[str]:
    size = int(gib * 2**30)
    monkeypatch.setattr(memory_check, "host_memory", lambda: HostMemory(size, size, 0, "this machine"))
    run = sized(**changes)
    return check_memory(run, build_model(run), **{"world": None, **more})


LONG = {"trainer.seq_length": 65536}


def test_a_run_that_surely_does_not_fit_is_refused_with_its_parts_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        checked(monkeypatch, 0.25, LONG)
    message = str(refused.value)
    for words in (
        "the run needs at least",
        "this machine has 0.2 GiB",
        "of activations of matrix products",
        "set a smaller trainer.micro_batch_size",
        "recompute",
        "trainer.seq_length",
        "context parallelism",
        "set trainer.memory_check=warn",
    ):
        assert words in message
    assert "\n" not in message


def test_the_setting_warns_or_leaves_out_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = checked(monkeypatch, 0.25, {**LONG, "trainer.memory_check": "warn"})
    assert warning.startswith("the run needs at least")
    assert checked(monkeypatch, 0.25, {**LONG, "trainer.memory_check": "off"}) == []


def test_a_run_that_may_not_fit_starts_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = checked(monkeypatch, 1.5, LONG)
    assert warning.startswith("the run may exceed the memory: the estimate is")
    assert checked(monkeypatch, 64, LONG) == []


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas need twice the memory of one; a launcher says how many are on this machine."""
    pair = {**LONG, "parallel.layout": "dp2", "trainer.memory_check": "refuse"}
    alone = World(rank=0, size=2, local_rank=0, launcher="torchrun", local_size=1)
    needs = []
    for world in (None, alone):
        with pytest.raises(UsageError) as refused:
            checked(monkeypatch, 0.1, pair, world=world)
        needs.append(float(str(refused.value).split("at least ")[1].split()[0]))
    assert needs[0] == pytest.approx(2 * needs[1], rel=0.1)


def write(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\nSwapFree:          5 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


KIB = 1024


def test_memory_without_control_groups_is_that_of_the_machine(tmp_path: Path) -> None:
    assert host_memory(write(tmp_path, {})) == HostMemory(1000 * KIB, 800 * KIB, 5 * KIB, "this machine")


def test_a_limit_of_version_2_counts_also_if_a_parent_has_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/task\n",
        "sys/fs/cgroup/job/task/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": f"{500 * KIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{300 * KIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {100 * KIB}\n",
    }
    found = host_memory(write(tmp_path, files))
    assert (found.total, found.available) == (500 * KIB, 300 * KIB)
    assert "control group" in found.source


def test_a_limit_of_version_1_counts_in_a_container_whose_group_is_mounted_as_the_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{400 * KIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{350 * KIB}\n",
    }
    found = host_memory(write(tmp_path, files))
    assert (found.total, found.available) == (400 * KIB, 50 * KIB)
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert host_memory(write(tmp_path, unlimited)).total == 1000 * KIB


@pytest.mark.gpu
def test_a_gpu_that_cannot_hold_a_run_refuses_it_and_the_estimate_is_near_the_peak() -> None:
    wide = {"model.hidden_size": 1024, "trainer.seq_length": 2048, "trainer.precision": "bf16"}
    run = tiny_run({**SIZES, **wide, "trainer.device": "cuda", "trainer.global_batch_size": 2})
    model = build_model(run)
    need = needed(run, model, estimate_activations(run, model), None)
    parts = build(run)
    torch.cuda.reset_peak_memory_stats()
    for run.step in (1, 2):
        launch_step(run, parts, 2, 1e-4, 0.1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    assert need.certain < peak
    assert 0.5 < need.expected / peak < 2
    endless = tiny_run({**SIZES, **wide, "trainer.seq_length": 2**24, "trainer.device": "cuda"})
    with pytest.raises(UsageError, match="a GPU of this machine has"):
        check_memory(endless, build_model(endless), None)
