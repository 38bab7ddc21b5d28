"""Steps that are recorded once and replayed (`trainer.graphs`), shown on a CPU by a recording of torch's operations.

`test_gpu_graphs.py` shows the same with CUDA graphs.
"""

import math
from typing import Any

import pytest
import torch
from mplug_lora import LoRA
from mplug_sdpa import SDPA
from replayed import EXPERTS, GPT, STEPS, Seen, assert_equal, graphed, trained
from torch import Tensor

from mplug.contracts.optimizer import Optimizer, StepScalars, WeightExchange
from mplug.errors import RunError, UsageError
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug_graphs import obstacles as obstacles_of
from mplug_graphs import stepper as graphs
from mplug_nn import Dropout
from mplug_steps.repeating import RepeatingStepper
from mplug_testing import Fault, ModelSuite, run_workers
from mplug_testing.harness import TinySettings, tiny_run


@pytest.mark.parametrize(("settings", "recorded"), [(GPT, 2), (EXPERTS, 1)], ids=["gpt", "experts"])
@pytest.mark.wide("families", quick=["gpt"])
def test_twenty_replayed_steps_are_twenty_eager_steps_to_the_bit(settings: TinySettings, recorded: int) -> None:
    eager, replayed = trained(settings, False), trained(settings, True)
    assert replayed.recorded == recorded
    assert len({tuple(figures["numbers"]) for figures in eager.figures}) == STEPS
    assert_equal(replayed, eager)


def test_the_loss_scale_of_fp16_passes_from_replay_to_replay() -> None:
    settings = {**GPT, "trainer.precision": "fp16", "trainer.loss_scale": {"growth_interval": 2}, "trainer.steps": 8}
    eager, replayed = trained(settings, False), trained(settings, True)
    assert len({figures["loss_scale"] for figures in eager.figures}) > 2
    assert_equal(replayed, eager)


@pytest.mark.parametrize("reaction", ["stop", "skip"])
@pytest.mark.wide("families", quick=["stop"])
def test_a_replayed_step_that_is_not_finite_has_the_effect_of_an_eager_one(reaction: str) -> None:
    """After it, 'stop' skips every further step, so the recording carries this from replay to replay."""
    held: list[Tensor] = []

    def poison(step: int, parts: Parts) -> None:
        weight = parts.pieces[-1].master.view(-1)
        if step == 6:
            held.append(weight[3].clone())
            weight[3] = math.nan
        if step == 7:
            weight[3] = held.pop()

    settings = {**GPT, "trainer.steps": 8, "trainer.nonfinite": reaction, "schedule.batch_rampup.start": None}
    eager, replayed = trained(settings, False, poison), trained(settings, True, poison)
    skipped = [figures["numbers"][3] for figures in eager.figures]
    assert skipped == [0.0] * 5 + [1.0] + [1.0 if reaction == "stop" else 0.0] * 2
    assert_equal(replayed, eager)


@pytest.mark.wide("families")
def test_a_request_to_stop_reaches_a_replayed_step() -> None:
    def stop(step: int, parts: Parts) -> None:
        parts.stepper.run.stop_requested = step == 7  # type: ignore[attr-defined]

    seen = trained({**GPT, "trainer.steps": 9, "schedule.batch_rampup.start": None}, True, stop)
    assert [figures["numbers"][4] for figures in seen.figures] == [0.0] * 6 + [1.0, 0.0, 0.0]


def test_no_step_depends_on_the_flags_of_sinks_that_it_finds() -> None:
    """For this reason a recording may contain the branches that the flags decided."""

    def scramble(step: int, parts: Parts) -> None:
        for number, sink in enumerate(parts.model.sinks.values()):
            sink.stale.fill_((number + step) % 2 == 0)
            sink.final, sink.last = (number + step) % 3 == 0, (number + step) % 5 == 0

    settings = {**GPT, "trainer.steps": 6}
    assert_equal(trained(settings, False, scramble), trained(settings, False))
    assert_equal(trained(settings, True, scramble), trained(settings, False))


def test_passes_that_run_again_run_eagerly_and_the_next_step_is_a_replay() -> None:
    """Some passes are not exact, among them those of the first recorded step."""

    def repeat(step: int, parts: Parts) -> None:
        if step > 1:
            return
        model, inner, due = parts.model, parts.stepper, [4]

        def check() -> bool:
            if inner.run.step not in due:  # type: ignore[attr-defined]
                return True
            due.remove(inner.run.step)  # type: ignore[attr-defined]
            for parameter in model.module.parameters():
                parameter.main_grad.fill_(math.nan)  # type: ignore[attr-defined]
            return False

        parts.stepper = RepeatingStepper(model, inner, [check])

    settings = {**GPT, "trainer.steps": 6, "schedule.batch_rampup.start": None}
    eager, replayed = trained(settings, False), trained(settings, True, repeat)
    assert (replayed.figures[-1].pop("repeated_steps"), replayed.recorded) == (1, 1)
    assert [one["numbers"] for one in replayed.figures] == [one["numbers"] for one in eager.figures]
    assert [name for name, value in eager.state.items() if not torch.equal(value, replayed.state[name])] == []


@pytest.mark.wide("experts")
def test_rows_without_room_are_computed_again_by_a_stepper_of_graphs() -> None:
    settings = {**EXPERTS, "trainer.steps": 4, "parallel.layout": "ep2", "parallel.ep.dispatch": "bounded"}
    for eager, deferred in run_workers(2, exchanged, {**settings, "parallel.ep.room": 1.02}):
        assert eager.figures[-1]["repeated_steps"] > 0
        assert_equal(deferred, eager)


class Waiting(Optimizer):
    """An optimizer whose fourth step reads a value of the device."""

    needs = "elements"

    def __init__(self) -> None:
        self.steps = 0

    def step(self, scalars: StepScalars) -> None:
        self.steps += 1
        if self.steps == 4:
            scalars.skip.item()

    def state(self, piece: Any) -> dict[str, Tensor]:
        return {}


def test_a_step_that_makes_the_cpu_wait_ends_the_run_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(step: int, parts: Parts) -> None:
        if step == 1:
            monkeypatch.setattr(parts.stepper.default, "optimizer", Waiting())  # type: ignore[attr-defined]

    with pytest.raises(RunError, match=r"^the step cannot be recorded as a CUDA graph: Reads.*set trainer\.graphs=fal"):
        trained(GPT, True, wait)


def exchanged(settings: TinySettings) -> tuple[Seen, Seen]:
    """Be one rank: an eager run, and one whose stepper exchanges weights when a step begins, and never records."""
    eager = trained(settings, False)
    graphs.WARMUP = STEPS
    return eager, trained(settings, True)


def test_weights_that_a_step_exchanges_first_are_those_that_the_last_step_exchanges() -> None:
    settings = {**GPT, "trainer.steps": 4, "parallel.layout": "zero2", "parallel.zero.bucket_mib": 0.02}
    for eager, deferred in run_workers(2, exchanged, settings):
        assert_equal(deferred, eager)


def test_a_recorded_step_begins_and_ends_every_exchange_of_weights() -> None:
    calls: list[str] = []
    parts = build(tiny_run({}))
    parts.model.exchanges += [
        WeightExchange(begin=lambda: calls.append("begin"), wait=lambda: calls.append("wait")),
        WeightExchange(begin=lambda: calls.append("write"), wait=None),
    ]
    stepper, around = graphed(parts), parts.stepper.apply  # type: ignore[attr-defined]
    parts.stepper.apply = lambda *given: (calls.append("update"), around(*given))[1]  # type: ignore[attr-defined]
    stepper.forward_backward(parts.train_loader.take(8), 1)
    stepper.update(1e-3, 0.0)
    assert calls == ["begin", "write", "wait", "update"]


@pytest.mark.wide("families")
def test_recordings_of_many_shapes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 1)
    settings = {**GPT, "trainer.steps": 14}
    seen = trained(settings, True)
    assert seen.recorded == 1
    assert_equal(seen, trained(settings, False))


class OfGPT(ModelSuite):
    plugin = "gpt"


@pytest.mark.wide("suites")
def test_the_suite_of_models_catches_a_count_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(self: Any, x: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x + self.calls * torch.linspace(0, 1e-2, x.shape[-1])

    OfGPT().test_replayed_steps_are_steps()
    monkeypatch.setattr(Dropout, "forward", counting)
    with pytest.raises(
        Fault,
        match=r"states .captures., and after 3 replayed steps, the loss of step 5 has other",
    ):
        OfGPT().test_replayed_steps_are_steps()


# What is refused before a run.


def found(settings: TinySettings, device: str = "cuda") -> list[str]:
    """Why a graph cannot replay the run's steps, if the machine had a GPU."""
    run = tiny_run(settings)
    model = build_model(run)
    run.device = device
    return obstacles_of.step_obstacles(run, model)


@pytest.mark.parametrize(
    ("layout", "optimizer"), [("", "lion"), ("", "sgd"), ("dp2", "muon"), ("zero2", "adamw"), ("zero2", "muon")]
)
def test_one_process_dp_and_zero_can_be_replayed(layout: str, optimizer: str) -> None:
    settings = {"parallel.layout": layout, "optimizer.name": optimizer, "memory.recompute.mode": "selective"}
    assert found({**settings, "kernels.default": "reference", "model.attention_dropout": 0.5}) == []


REFUSED: dict[str, tuple[TinySettings, tuple[str, ...]]] = {
    "another strategy": ({"parallel.layout": "tp2"}, ("parallel/tp counts its copies in signals between GPUs",)),
    "a stepper of a strategy": ({"parallel.layout": "pp2"}, ("parallel/pp runs the step in an order of its own",)),
    "offload": ({"memory.recompute.offload": True}, ("memory/recompute copies activations to the CPU",)),
    "an optimizer of a group": (
        {"optimizer.groups": [{"match": "embedding", "optimizer": {"name": "soap"}}]},
        ("optimizers/soap refreshes bases in steps that it chooses",),
    ),
    "fused dropout": ({"model.attention_dropout": 0.5}, ("kernels/sdpa draws dropout masks",)),
    "experts on the CPU": (
        {"model.name": "mixtral", "model.num_experts": 4},
        ("the CPU waits for the device in 'blocks.*.moe.experts'", "bf16"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_named(name: str) -> None:
    settings, words = REFUSED[name]
    message = "; ".join(found(settings))
    assert [word for word in words if word not in message] == [], message


def test_a_run_on_the_cpu_is_refused_in_a_sentence() -> None:
    begin = r"trainer.graphs=true \(the suite's settings\): a CUDA graph cannot replay the steps of this run"
    with pytest.raises(UsageError, match=rf"^{begin}.*the run is on the CPU.*; set trainer.graphs=false, or [^\n]*$"):
        build_model(tiny_run({"trainer.graphs": True}))


def test_a_plugin_without_an_answer_is_refused_only_where_it_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that only adapts the model takes part: the modules that it attaches compute in every step."""
    monkeypatch.setattr(SDPA, "captures", "is busy")
    assert found({}) == ["kernels/sdpa is busy"]
    settings = {"adapters.lora.rank": 3, "model.num_layers": 2, "kernels.attention": "reference"}
    assert found(settings) == []
    for hook in ("captures", "shard_model"):
        monkeypatch.delattr(LoRA, hook)
    assert found(settings) == [
        "adapters/lora does not state that its part of a step can be replayed (the hook 'captures')"
    ]
