"""What a run says about its steps before the first one: their size, their least duration, what is missing for them."""

from dataclasses import replace
from typing import Any

import pytest

from mplug.config.host_sections import Recipe
from mplug.distributed.world import World
from mplug.model.build import build_model
from mplug.run.durations import TRIAL
from mplug_estimates import step_estimate
from mplug_estimates.course import data_gap
from mplug_estimates.step_estimate import about_step, recipe_gaps
from mplug_testing.harness import tiny_run

SIZES: dict[str, Any] = {
    "trainer.seq_length": 64,
    "trainer.global_batch_size": 8,
    "trainer.micro_batch_size": 2,
    "trainer.steps": 100,
}


def about(done: int = 0, **changes: Any) -> str:
    run = tiny_run({**SIZES, **changes})
    return about_step(run, build_model(run), None, done)


def test_a_step_is_samples_tokens_and_micro_batches() -> None:
    assert about() == "a step: 8 samples of 64 tokens (512 tokens), 4 micro batches"
    assert about(**{"parallel.layout": "dp2"}).endswith("(512 tokens), 2 micro batches on each rank")
    assert about(**{"trainer.micro_batch_size": 8}) == "a step: 8 samples of 64 tokens (512 tokens)"
    one = {"trainer.global_batch_size": 1, "trainer.micro_batch_size": 1}
    assert about(**one) == "a step: 1 sample of 64 tokens (64 tokens)"
    ramp = {"schedule.batch_rampup.start": 2, "schedule.batch_rampup.increment": 2, "schedule.batch_rampup.samples": 64}
    assert about(**ramp).startswith("a step: up to 8 samples of 64 tokens")


def test_the_least_duration_is_the_work_over_the_speed_if_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(SIZES)
    model = build_model(run)
    flops = model.flops.of(512, 8 * 64**2)
    monkeypatch.setattr(step_estimate, "SLOWEST_FLOPS", 0.1)
    monkeypatch.setattr(step_estimate, "_cpu_tflops", lambda _: flops / 7e12)  # 7 seconds per step
    assert "; at least 7 s by this CPU's speed, 11:40 for 100 steps" in about_step(run, model, None)
    assert "at least" not in about_step(run, model, None, done=50)
    monkeypatch.setattr(step_estimate, "_cpu_tflops", lambda _: flops / 70e12)
    assert about_step(run, model, None).endswith(f"at least 1:10 by this CPU's speed, 1:56:40 for 100 steps; {TRIAL}")
    run.device = "cuda"
    monkeypatch.setattr(step_estimate, "peak_tflops", lambda _: flops / 70e12)
    assert about_step(run, model, None).endswith("at least 1:10 at the GPUs' peak, 1:56:40 for 100 steps")
    monkeypatch.setattr(step_estimate, "peak_tflops", lambda _: None)
    assert about_step(run, model, None).endswith("4 micro batches")


def test_no_speed_is_measured_for_a_run_that_is_short_at_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(step_estimate, "_cpu_tflops")
    assert about().endswith("4 micro batches")
    with pytest.raises(NameError, match="_cpu_tflops"):
        about(**{"trainer.steps": 10**6})


def test_a_cpu_is_measured_and_its_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert 1e-4 < step_estimate._cpu_tflops(torch.float32) < 100
    monkeypatch.setattr(step_estimate, "_cpu_tflops", lambda _: 1.0)
    monkeypatch.setattr(step_estimate.os, "cpu_count", lambda: 2 * torch.get_num_threads())
    run = tiny_run({**SIZES, "parallel.layout": "dp4"})
    assert step_estimate._tflops(run, None) == 2
    machines = World(0, 4, 0, "torchrun", 2)
    assert step_estimate._tflops(run, machines) == 4


def test_data_of_less_than_a_step_are_reported_with_the_remedies() -> None:
    run = tiny_run(SIZES)
    assert data_gap(run, None) == data_gap(run, 8) == []
    (line,) = data_gap(run, 5)
    assert line.startswith(
        "the training data hold 5 samples of 64 tokens, and a step takes 8: each step reads all data"
    )
    assert "1.6 times, and the run 160 times; set a smaller trainer.global_batch_size (--batch-size)" in line


def test_a_machine_that_lacks_what_a_recipe_states_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(SIZES)
    assert recipe_gaps(run, None) == []
    recipe = {"name": "big", "needs": "2 GPUs with 80 GB", "machine": {"gpus": 2, "gpu_memory_gb": 80}}
    run.config = replace(run.config, recipe=Recipe.model_validate(recipe))
    (line,) = recipe_gaps(run, None)
    assert line == (
        f"the recipe 'big' is made for GPUs, and this run computes on a CPU (needs: 2 GPUs with 80 GB); {TRIAL}"
    )
    run.device = "cuda"
    memory = [85e9]
    monkeypatch.setattr(step_estimate.torch.cuda, "device_count", lambda: len(memory))
    monkeypatch.setattr(
        step_estimate.torch.cuda,
        "get_device_properties",
        lambda number: type("Properties", (), {"total_memory": memory[number]}),
    )
    (line,) = recipe_gaps(run, None)
    assert "'big' is made for 2 GPUs, and this run has 1 (needs: " in line
    memory[:] = [85e9, 85e9]
    assert recipe_gaps(run, None) == []
    memory[:] = [85e9, 25e9]
    (line,) = recipe_gaps(run, None)
    assert "'big' is made for GPUs with 80 GB, and one of this machine has 25 GB" in line
