"""DiLoCo in one process: the workers run in turn as plain runs of one process, and torch's SGD takes the outer step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mplug.training.assembly import Parts, build
from mplug.training.schedule import learning_rate
from mplug_testing.harness import Boxes, in_fp64, tiny_run, with_ragged_labels
from mplug_validation import evaluate

STEPS = 9

STREAMED: dict[str, Any] = {
    "parallel.diloco.every": 4,
    "parallel.diloco.fragments": 2,
    "parallel.diloco.delay": 1,
    "parallel.diloco.alpha": 0.25,
    "trainer.steps": 9,
}
"""Two fragments, which arrive a step after they are sent."""


@dataclass
class Record:
    """The figures of every step, the validation loss of the global weights, and both kinds of weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    global_weights: dict[str, Any] = field(default_factory=dict)
    local_weights: dict[str, Any] = field(default_factory=dict)


def whole_step(parts: Parts, number: int) -> dict[str, Tensor]:
    """The samples of a step in one micro batch, with ragged labels."""
    batches = [with_ragged_labels(batch) for batch in parts.train_loader.loader.take(number)]
    return {
        name: torch.cat([batch[name] for batch in batches])
        if len(batches[0][name]) == len(batches[0]["sample_ids"])
        else batches[0][name]
        for name in batches[0]
    }


def part_of(whole: Mapping[str, Tensor], start: int, stop: int, size: int) -> list[dict[str, Tensor]]:
    """The samples from start to stop, in micro batches of `size`."""
    count = len(whole["sample_ids"])
    cuts = [*range(start, stop, size), stop]
    return [
        {name: entry[a:b] if len(entry) == count else entry for name, entry in whole.items()} for a, b in pairwise(cuts)
    ]


def simulated(settings: dict[str, Any], workers: int, steps: int = STEPS) -> Record:
    """Train `workers` plain models in this process; settings of `parallel.diloco` are those of the outer step."""
    own = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    outer = {"every": 100, "fragments": 1, "delay": 0, "alpha": 0.0, "lr": 0.7, "momentum": 0.9}
    outer |= {name.rpartition(".")[2]: value for name, value in settings.items() if name.startswith("parallel.diloco.")}
    runs = [tiny_run(in_fp64(own)) for _ in range(workers)]
    models = [build(run) for run in runs]
    masters = [{piece.name: piece.master for piece in parts.pieces} for parts in models]
    trained = {name: torch.nn.Parameter(master.clone()) for name, master in masters[0].items()}
    units = [unit.name for unit in models[0].model.plan.units]
    fragment = {
        name: next((n for n, unit in enumerate(units) if name.startswith(f"{unit}.")), 0) % outer["fragments"]
        for name in trained
    }
    sgd = torch.optim.SGD(trained.values(), lr=outer["lr"], momentum=outer["momentum"], nesterov=outer["momentum"] > 0)
    due: list[tuple[int, int]] = []
    record, config = Record(), runs[0].config
    last, distance = config.trainer.steps, outer["every"] // outer["fragments"]
    for step in range(1, steps + 1):
        whole = whole_step(models[0], config.trainer.global_batch_size)
        lr = learning_rate(step, config.optimizer.lr, config.schedule, last)
        losses, norms, tokens = [], [], 0.0
        for worker, (run, parts) in enumerate(zip(runs, models, strict=True)):
            run.step = step
            each = config.trainer.global_batch_size // workers
            batches = part_of(whole, worker * each, (worker + 1) * each, config.trainer.micro_batch_size or each)
            parts.stepper.forward_backward(parts.train_loader.step_of(batches), step)
            result = parts.stepper.update(lr, config.optimizer.weight_decay)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
            tokens += float(result.tokens)
        record.losses.append(sum(losses) / workers)
        record.norms.append(sum(norms) / workers)
        record.tokens.append(tokens)

        def merge(number: int) -> None:
            for name, value in trained.items():
                for of_worker in masters:
                    if fragment[name] == number:
                        of_worker[name].lerp_(value.detach(), 1 - outer["alpha"])

        for merges_at, number in due[:]:
            if merges_at == step or step == last:
                merge(number)
                due.remove((merges_at, number))
        starting = range(outer["fragments"]) if step == last else []
        if step != last and step % distance == 0:
            starting = [(step // distance - 1) % outer["fragments"]]
        for number in starting:
            for name, value in trained.items():
                mean = sum(value.detach() - of_worker[name] for of_worker in masters) / workers
                value.grad = mean if fragment[name] == number else None
            sgd.step()
            if outer["delay"] == 0 or step == last:
                merge(number)
            else:
                due.append((step + outer["delay"], number))
        record.val_losses.append(_evaluated(models[0], runs[0], masters[0], trained))
    record.global_weights = {name: value.detach() for name, value in trained.items()}
    record.local_weights = {name: torch.stack([one[name] for one in masters]) for name in trained}
    return record


def _evaluated(parts: Parts, run: Any, masters: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> float:
    local = {name: master.clone() for name, master in masters.items()}
    for name, master in masters.items():
        master.copy_(trained[name].detach())
    loss = evaluate(run, parts)
    for name, master in masters.items():
        master.copy_(local[name])
    return loss


def trained_rank(settings: dict[str, Any], steps: int = STEPS) -> tuple[Record, dict[str, tuple[int, ...]]]:
    """Be one rank of a run: its record, with its boxes of weights, and the shapes of parameters."""
    from mplug.gradients.region import region

    run = tiny_run(in_fp64(settings))
    parts, record, config = build(run), Record(), run.config
    first = run.mesh.batch_shard(run.rank)
    for step in range(1, steps + 1):
        run.step = step
        batches = [
            with_ragged_labels(batch) for batch in parts.train_loader.loader.take(config.trainer.global_batch_size)
        ]
        parts.stepper.forward_backward(parts.train_loader.step_of(batches), step)
        lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        record.losses.append(float(result.loss))
        record.norms.append(float(result.grad_norm))
        record.tokens.append(float(result.tokens))
        record.val_losses.append(evaluate(run, parts))
    assert first is not None
    worker, _ = run.mesh.worker(run.rank)

    def boxes(of: Any, prefix: tuple[int, ...]) -> dict[str, Boxes]:
        return {
            piece.name: [
                ((*prefix, *box.start), region(of(piece), box).clone())
                for box in piece.placement.boxes(run.rank)
                if box.copies.first == run.rank
            ]
            for piece in parts.pieces
        }

    record.global_weights = boxes(lambda piece: parts.optimizer.state(piece)["global"], ())
    record.local_weights = boxes(lambda piece: piece.master, (worker,))
    return record, {name: placement.shape for name, placement in parts.model.placements.items()}
