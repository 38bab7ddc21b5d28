"""Profiles of steps and snapshots of memory: what the files hold, and which steps and ranks they are of."""

import gzip
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_profile import Profile
from pydantic import ValidationError

from mplug import Run, UsageError, hookimpl
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_config, tiny_run


@pytest.mark.wide("loggers")
class TestProfile(ExtensionSuite):
    plugin = "profile"
    settings = {"extensions.profile.steps": 2, "extensions.profile.first": 2}
    files = ("profile/steps_*",)
    keeps_history = False  # it records some steps of one start
    checks_fields = False  # the tests below check each field: the content of a trace is chance


def trained(directory: Path, **settings: Any) -> None:
    run = tiny_run({"trainer.steps": 4, "extensions.profile": settings})
    run.directory = directory
    train(run)


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("profile/*"))


def test_a_trace_has_the_chosen_steps_and_their_operators(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, steps=2, first=3)
    assert names(tmp_path) == ["steps_3-4_rank0.json.gz"]
    path = tmp_path / "profile" / "steps_3-4_rank0.json.gz"
    found = events(path)
    assert len({one["name"] for one in found if re.match(r"ProfilerStep#", one["name"])}) == 2
    assert sum(one["name"] == "aten::embedding" for one in found) == 2 * 4  # steps, micro batches
    assert not [one for one in found if "Input Dims" in one.get("args", {}) or one.get("cat") == "python_function"]
    message = f"wrote a profile: {path}; open it: https://ui.perfetto.dev"
    printed = capfd.readouterr().err
    assert message in printed
    assert "USDT" not in printed


@pytest.mark.wide("loggers")
def test_a_trace_can_begin_at_the_first_step_and_have_shapes_and_stacks(tmp_path: Path) -> None:
    trained(tmp_path, steps=1, first=1, shapes=True, stacks=True)
    assert names(tmp_path) == ["steps_1_rank0.json.gz"]
    found = events(tmp_path / "profile" / "steps_1_rank0.json.gz")
    assert [one for one in found if "Input Dims" in one.get("args", {})]
    assert [one for one in found if one.get("cat") == "python_function"]


def run_of(directory: Path, rank: int = 0, step: int = 0, steps: int = 20) -> Any:
    """A run whose process begins after `step`."""
    config = SimpleNamespace(trainer=SimpleNamespace(steps=steps))
    return SimpleNamespace(rank=rank, directory=directory, step=step, device="cpu", config=config)


def recorded(run: Any, **settings: Any) -> tuple[int, int] | None:
    plugin = Profile(Profile.Config(**settings))
    plugin.run_started(run)
    steps = plugin.trace.steps if plugin.trace is not None else None
    plugin.run_finished()
    return None if steps is None else (steps[0], steps[-1])


def test_the_recorded_steps_follow_the_start_of_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded(run_of(tmp_path), steps=3) == (6, 8)
    assert recorded(run_of(tmp_path, step=10), steps=3) == (16, 18)
    assert recorded(run_of(tmp_path, step=10), steps=9) == (16, 20)
    assert recorded(run_of(tmp_path, step=10), steps=3, first=12) == (12, 14)
    assert recorded(run_of(tmp_path, step=10), steps=3, first=9) is None
    assert recorded(run_of(tmp_path)) is None
    assert capsys.readouterr().err == ""
    assert recorded(run_of(tmp_path, steps=3), steps=3) is None
    assert "no step is profiled: the first one would be step 6" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_only_the_chosen_ranks_record(tmp_path: Path) -> None:
    ranks = [run_of(tmp_path, rank) for rank in range(3)]
    assert [recorded(run, steps=1) for run in ranks] == [(6, 6), None, None]
    assert [recorded(run, steps=1, ranks=[1, 2]) for run in ranks] == [None, (6, 6), (6, 6)]
    assert [recorded(run, steps=1, ranks="all") for run in ranks] == [(6, 6)] * 3


def test_the_steps_before_a_failure_are_written(tmp_path: Path) -> None:
    plugin, run = Profile(Profile.Config(steps=5, first=2, ranks="all")), run_of(tmp_path, rank=3)
    plugin.run_started(run)
    for run.step in (1, 2, 3):
        plugin.step_started(run)
        torch.ones(3).sum()
    plugin.run_failed(run, ValueError())
    assert names(tmp_path) == ["steps_2-3_rank3.json.gz"]
    assert sum(one["name"] == "aten::ones" for one in events(tmp_path / "profile" / names(tmp_path)[0])) == 2


def test_a_run_that_exhausts_the_memory_of_a_gpu_writes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The functions of torch are replaced; the next test has a real GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **words: calls.append(words))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).touch())
    for settings, device, error, written in (
        ({}, "cuda:0", torch.OutOfMemoryError(), True),
        ({"memory_entries": 7}, "cuda:0", RuntimeError("another error"), False),
        ({"steps": 3}, "cuda:0", torch.OutOfMemoryError(), False),
        ({"steps": 3, "memory_snapshot": True}, "cuda:0", torch.OutOfMemoryError(), True),
        ({"memory_snapshot": False}, "cuda:0", torch.OutOfMemoryError(), False),
        ({}, "cpu", torch.OutOfMemoryError(), False),
    ):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        plugin = Profile(Profile.Config(**settings))  # type: ignore[arg-type]
        run: Any = SimpleNamespace(rank=2, directory=directory, device=device)
        plugin.activity_began(run)
        plugin.activity_began(run)
        outer = RuntimeError("of a plugin")
        outer.__cause__ = error
        plugin.run_failed(run, outer)
        assert names(directory) == (["memory_rank2.pickle"] if written else []), settings
    on = {"stacks": "python", "max_entries": 100_000}
    off = {"enabled": None}
    assert calls == [on, off, {**on, "max_entries": 7}, off, on, off]
    message = capsys.readouterr().err.splitlines()[0]
    assert message.startswith("mplug: rank 2 ran out of GPU memory")
    assert "python -m torch.cuda._memory_viz trace_plot" in message


class Exhausting:
    """An observer that asks for more memory than a GPU has, at step 2."""

    @hookimpl
    def step_started(self, run: Run) -> None:
        if run.step == 2:
            self.kept = [torch.empty(2**30, dtype=torch.uint8, device=run.device) for _ in range(4096)]


@pytest.mark.gpu
def test_a_real_gpu_gets_a_trace_of_its_kernels_and_a_snapshot(tmp_path: Path) -> None:
    cuda = {"trainer.device": "cuda", "trainer.precision": "bf16", "trainer.steps": 4}
    run = tiny_run({**cuda, "extensions.profile": {"steps": 2, "first": 3}})
    run.directory = tmp_path / "traced"
    train(run)
    found = events(tmp_path / "traced" / "profile" / "steps_3-4_rank0.json.gz")
    assert [one for one in found if one.get("cat") == "kernel"]
    settings = {**cuda, "extensions.profile": {"memory_entries": 5000}}
    run = prepare(tiny_config(settings), {f"{HOST}exhausting": Exhausting()})
    run.device, run.directory = "cuda", tmp_path / "exhausted"
    with pytest.raises(torch.OutOfMemoryError):
        train(run)
    path = tmp_path / "exhausted" / "profile" / "memory_rank0.pickle"
    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) > 2**32
    stacks = [entry["frames"] for trace in snapshot["device_traces"] for entry in trace]
    assert any("test_profile" in frame["filename"] for frames in stacks for frame in frames)
    page = tmp_path / "memory.html"
    shown = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(page)]
    subprocess.run(shown, check=True, capture_output=True)
    assert page.stat().st_size > 10_000


def test_settings_without_an_effect_are_refused() -> None:
    with pytest.raises(ValidationError, match="'first' has no effect without 'steps'"):
        Profile.Config(first=3)
    with pytest.raises(UsageError, match="first=9 is behind the last step"):
        tiny_run({"trainer.steps": 4, "extensions.profile": {"steps": 1, "first": 9}})


def test_the_flag_names_the_extension(cli_here: Any) -> None:
    shown = cli_here("config", "show", "--profile", "3").stdout
    assert re.search(r"\n  profile:\n    steps: 3\n    first: null\n    ranks:\n    - 0\n", shown)
    assert tiny_config({"extensions.profile.steps": 3})
