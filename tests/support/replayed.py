"""Runs of a few steps, eager or replayed, and what is seen of them. Shared by the tests of a CPU and those of GPUs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import MIXTRAL
from torch import Tensor

from mplug.training.assembly import Parts, build
from mplug.training.schedule import batch_size, learning_rate, weight_decay
from mplug.training.stepper import DefaultStepper
from mplug_graphs import GraphedStepper
from mplug_steps.repeating import RepeatingStepper
from mplug_testing.harness import TinySettings, tiny_run
from mplug_testing.recording import Operations
from mplug_validation import evaluate

STEPS = 20
GPT: TinySettings = {
    "optimizer.name": "lion",
    "model.num_layers": 1,
    "model.dropout": 0.125,
    "trainer.steps": STEPS,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 6,
    "schedule.weight_decay": {"name": "linear", "end": 2.0},
    "schedule.batch_rampup": {"start": 4, "increment": 4, "samples": 40},
}
"""Every number of a step changes: rates, decay, keys, and, after ten steps, the number of micro batches."""
EXPERTS: TinySettings = {
    **MIXTRAL,
    "model.num_layers": 1,
    "model.moe_router_jitter": 0.1,
    "model.moe_balance": "global_batch",
    "model.expert_bias_rate": 1e-2,
    "trainer.steps": STEPS,
    "memory.recompute.mode": "full",
}
"""States of modules change after every step, and noise is drawn in forward and again in backward."""


@dataclass
class Seen:
    """The figures of all steps, and the state after them."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    val_losses: list[float] = field(default_factory=list)
    recorded: int = 0


Before = Callable[[int, Parts], None]


def nothing(step: int, parts: Parts) -> None:
    """Change nothing before a step."""


def graphed(parts: Parts) -> GraphedStepper:
    default = parts.stepper.stepper if isinstance(parts.stepper, RepeatingStepper) else parts.stepper
    assert isinstance(default, DefaultStepper)
    flags = [sink.stale for sink in parts.model.sinks.values()]
    return GraphedStepper(default, lambda: Operations(flags))


def trained(settings: TinySettings, replayed: bool, before: Before = nothing) -> Seen:
    """Train, evaluating after steps 10 and 20; `before` may change something before each step.

    On a GPU, CUDA graphs replay steps. On a CPU, recorded operations do.
    """
    on_gpu = settings.get("trainer.device") == "cuda"
    run = tiny_run({**settings, "trainer.graphs": replayed and on_gpu})
    config, parts, seen, samples = run.config, build(run), Seen(), 0
    if replayed and not on_gpu and isinstance(parts.stepper, RepeatingStepper):
        parts.stepper.stepper = graphed(parts)
    elif replayed and not on_gpu:
        parts.stepper = graphed(parts)
    for step in range(1, config.trainer.steps + 1):
        run.step = step
        size = batch_size(samples, config.trainer, config.schedule.batch_rampup)
        samples += size
        before(step, parts)
        parts.stepper.forward_backward(parts.train_loader.take(size), step)
        lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
        decay = weight_decay(step, config.optimizer.weight_decay, config.schedule.weight_decay, config.trainer.steps)
        result = parts.stepper.update(lr, decay)
        numbers = (result.loss, result.grad_norm, result.tokens, result.skipped, result.stop, result.failed)
        more = {**result.figures, **result.statistics}
        seen.figures.append({"numbers": torch.stack([x.double() for x in numbers if x is not None]).tolist()})
        seen.figures[-1] |= {name: value.tolist() for name, value in more.items()}
        if step % 10 == 0:
            parts.validation_loader = parts.validation_loader or parts.train_loader
            seen.val_losses.append(evaluate(run, parts))
    inner = parts.stepper.stepper if isinstance(parts.stepper, RepeatingStepper) else parts.stepper
    if isinstance(inner, GraphedStepper):
        seen.recorded = inner.num_recorded
    seen.state = {f"{p.name}/{n}": x.clone() for p in parts.pieces for n, x in parts.optimizer.state(p).items()}
    seen.state |= {f"{piece.name}/weight": piece.master.clone() for piece in parts.pieces}
    seen.state |= {name: buffer.clone() for name, buffer in parts.model.states().items()}
    seen.state = {name: value.cpu() for name, value in seen.state.items()}
    return seen


def assert_equal(one: Seen, other: Seen) -> None:
    assert [repr(figures) for figures in one.figures] == [repr(figures) for figures in other.figures]
    assert one.val_losses == other.val_losses
    assert [name for name, value in one.state.items() if not torch.equal(value, other.state[name])] == []
