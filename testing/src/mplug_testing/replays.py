"""Whether recordings of an optimizer's step, and of a model's, can be replayed: on a CPU, bit for bit."""

import torch
from torch import Tensor

import mplug_testing.dense as dense
from mplug.errors import RunError
from mplug.model.build import build_model
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.loop import launch_step
from mplug.training.stepper import DefaultStepper
from mplug_graphs import WARMUP, GraphedStepper
from mplug_testing.harness import TinySettings, tiny_run
from mplug_testing.recording import Operations, Reads

STEPS = ((2e-2, 0.3, 0.25, 0.0), (5e-3, 0.0, 4.0, 0.0), (1e-2, 0.2, 1.0, 1.0), (3e-2, 0.1, 0.125, 0.0))
"""(learning rate, weight decay, scale, skip) of the replayed steps of an optimizer."""
REPLAYED = 3
"""Replayed steps of a model."""


def is_stated(run: Run, label: str) -> bool:
    """Whether a plugin says by the hook `captures` that its part of the run's steps can be replayed."""
    return dict(run.hooks.each("captures", run=run, model=build_model(run))).get(label) is True


def replay_fault(eager: dense.Bench, replayed: dense.Bench) -> str:
    """What differs between steps of two equal optimizers if those of the second are replayed; empty if nothing does."""
    for bench in (eager, replayed):
        bench.step(1)
    scalars, recording = replayed.scalars(), Operations()
    try:
        recording.record(lambda: replayed.optimizer.step(scalars))
    except Reads as read:
        return f"its step cannot be recorded: {read}"
    for number, (lr, decay, scale, skip) in enumerate(STEPS, start=2):
        values = {"lr": lr, "weight_decay": decay, "scale": scale, "skip": skip}
        eager.step(number, dense.gradient_of, **values)
        for piece in replayed.pieces:
            piece.gradient.copy_(dense.gradient_of(piece, number))
        for name, value in values.items():
            getattr(scalars, name).fill_(value)
        recording.replay()
        changed = dense.other_bits(eager.snapshot(), replayed.snapshot())
        if changed:
            return f"in a replayed step, {changed} has other bits than in a step that runs"
    return ""


def model_replay_fault(settings: TinySettings) -> str:
    """What differs between the steps of a run and replays of them; empty if nothing does."""
    try:
        eager, replayed = _trained(settings, replayed=False), _trained(settings, replayed=True)
    except RunError as error:
        return str(error)
    for name, values in eager.items():
        if not torch.equal(values, replayed[name]):
            return f"after {REPLAYED} replayed steps, {name} has other bits than after steps that run"
    return ""


def _trained(settings: TinySettings, replayed: bool) -> dict[str, Tensor]:
    run = tiny_run(settings)
    parts = build(run)
    assert isinstance(parts.stepper, DefaultStepper)
    flags = [sink.stale for sink in parts.model.sinks.values()]
    if replayed:
        parts.stepper = GraphedStepper(parts.stepper, lambda: Operations(flags))
    found = dict[str, Tensor]()
    for number in range(1, WARMUP + REPLAYED + 1):
        run.step = number
        optimizer, samples = run.config.optimizer, run.config.trainer.global_batch_size
        result, _ = launch_step(run, parts, samples, optimizer.lr / number, optimizer.weight_decay)
        found[f"the loss of step {number}"] = result.loss
    return found | {f"the weight '{piece.name}'": piece.master for piece in parts.pieces}
