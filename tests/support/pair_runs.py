"""The run of a case: two steps, an evaluation, a checkpoint after the first step and a resume, all compared in fp64.

The reference is one process in plain torch, without a compiler, recomputation or a strategy; of workers that train
independently, one process for each. Everything is compared
with a bound of 1e-10: losses, gradient norms, statistics, the gradients that the sinks hold (every copy of every box),
the movement of the master weights, and the loss of an evaluation.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.gradients.region import region
from mplug.run.folder import make_directory
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug.training.schedule import learning_rate
from mplug_saving.position import Position
from mplug_testing.harness import EXACT, as_rank, changed_batches, tiny_config
from mplug_testing.workers import run_workers
from mplug_validation import evaluate

STEPS = 2
Boxes = dict[str, list[tuple[tuple[int, ...], Tensor]]]
"""Name -> (start, values) of the boxes of a rank."""


@dataclass
class Trace:
    """The record of one rank; `weights` are the masters before the first step and after every step."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[int, Boxes] = field(default_factory=dict)
    weights: dict[int, Boxes] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    val_loss: float = 0.0


def nothing(run: Run, position: Position) -> None:
    """Change nothing between two steps."""


def follow(
    settings: dict[str, Any],
    directory: Path,
    resume_from: Path | None = None,
    between: Callable[[Run, Position], None] = nothing,
) -> Trace:
    """Train from the start, and save after the first step; or continue from a checkpoint. Then evaluate.

    `between` is called after the save.
    """
    run = as_rank(prepare(tiny_config(settings), directory=directory))
    position = begun(run)
    if resume_from is not None:
        position.load(position.choose(resume_from))
    return finished(run, position, between)


def begun(run: Run) -> Position:
    """The parts and the folder of a run that has done no step."""
    position = Position(run, build(run))
    make_directory(run)
    return position


def finished(run: Run, position: Position, between: Callable[[Run, Position], None] = nothing) -> Trace:
    """The remaining steps of a run, with a save after the first one, and an evaluation."""
    parts, trace = position.parts, Trace()
    trace.weights[run.step] = _held(run, parts)
    trace.shapes = {name: placement.shape for name, placement in parts.model.placements.items()}
    while run.step < STEPS:
        _step(run, position.parts, position, trace)
        if run.step == 1:
            position.save()
            between(run, position)
    trace.val_loss = evaluate(run, position.parts)
    run.hooks.observe("run_finished", run=run)
    return trace


def follow_workers(number: int, settings: dict[str, Any], directory: Path) -> list[Trace]:
    """`follow` from the start, in this process, or in one for each of a number of workers."""
    return [follow(settings, directory)] if number == 1 else run_workers(number, follow, settings, directory)


def _step(run: Run, parts: Parts, position: Position, trace: Trace) -> None:
    config = run.config
    run.step += 1
    batches = changed_batches(parts, config.trainer.global_batch_size)
    parts.stepper.forward_backward(batches, run.step)
    trace.gradients[run.step] = {piece.name: _boxes(run, piece.gradient, piece.placement) for piece in parts.pieces}
    lr = learning_rate(run.step, config.optimizer.lr, config.schedule, config.trainer.steps)
    result = parts.stepper.update(lr, config.optimizer.weight_decay)
    position.samples += config.trainer.global_batch_size
    trace.losses[run.step], trace.norms[run.step] = float(result.loss), float(result.grad_norm)
    trace.statistics[run.step] = {name: value.double().clone() for name, value in result.statistics.items()}
    trace.weights[run.step] = _held(run, parts)


def _held(run: Run, parts: Parts) -> Boxes:
    return {one.name: _boxes(run, one.values, one.placement) for one in parts.held()}


def _boxes(run: Run, tensor: Tensor, placement: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    return [(box.start, region(tensor, box).clone()) for box in placement.boxes(run.rank)]


def run_case(
    settings: dict[str, Any], resumed: dict[str, Any], folder: str, checkpoint: str | None
) -> tuple[Trace, Trace, float]:
    """Be one rank: the run from its start, the run that continues `checkpoint` (None: its own), and CPU seconds."""
    warnings.simplefilter("ignore")  # torch's own, while it traces
    whole = follow(settings, Path(folder) / "whole")
    source = Path(checkpoint) if checkpoint is not None else checkpoint_of(Path(folder) / "whole")
    torch.compiler.reset()
    continued = follow(resumed, Path(folder) / "resumed", source)
    return whole, continued, time.process_time()


def checkpoint_of(directory: Path) -> Path:
    """The checkpoint after the first step of the run in a folder."""
    (found,) = directory.glob("checkpoints/*1")
    return found


# The comparison.

Errors = Iterator[tuple[str, float, str]]
"""(kind of figure, relative error, sentence)."""


def errors(traces: list[Trace], reference: Trace) -> Errors:
    """Every error of a run against the reference; of the steps that the run has done."""
    for step in traces[0].losses:
        for kind, figures in (("loss", "losses"), ("norm", "norms")):
            expected = getattr(reference, figures)[step]
            for rank, trace in enumerate(traces):
                found = getattr(trace, figures)[step]
                sentence = f"{kind} {found} on rank {rank}, step {step}; expected {expected}"
                yield kind, _relative(abs(found - expected), abs(expected)), sentence
        yield from _of_statistics(step, traces, reference)
        yield from _of_gradients(step, traces, reference)
        yield from _of_weights(step, traces, reference)
    for rank, trace in enumerate(traces):
        error = _relative(abs(trace.val_loss - reference.val_loss), abs(reference.val_loss))
        yield "evaluation", error, f"evaluation {trace.val_loss} on rank {rank}; expected {reference.val_loss}"


def errors_of_workers(traces: list[Trace], references: list[Trace]) -> Errors:
    """Every error of the ranks of each worker against its own reference; workers have equally many ranks in a row."""
    size = len(traces) // len(references)
    for number, reference in enumerate(references):
        yield from errors(traces[number * size : (number + 1) * size], reference)


def _of_statistics(step: int, traces: list[Trace], reference: Trace) -> Errors:
    """Compare the statistics; the error is relative to max(|value|, 1e-3).

    Rewards of DPO are small differences of log-probabilities, whose rounding they have.
    """
    expected = reference.statistics[step]
    for rank, trace in enumerate(traces):
        found = trace.statistics[step]
        if found.keys() != expected.keys():
            yield "statistic", math.inf, f"statistics {sorted(found)} on rank {rank}; expected {sorted(expected)}"
        for name in found.keys() & expected.keys():
            size = max(float(expected[name].norm()), 1e-3)
            error = _relative(float((found[name] - expected[name]).norm()), size)
            values = f"{found[name].tolist()} on rank {rank}, step {step}; expected {expected[name].tolist()}"
            yield "statistic", error, f"statistic {name} is {values}"


def _of_gradients(step: int, traces: list[Trace], reference: Trace) -> Errors:
    expected = _wholes(reference.gradients[step], reference.shapes)
    yield from _of_tensors("gradient", step, [trace.gradients[step] for trace in traces], expected, expected)


def _of_weights(step: int, traces: list[Trace], reference: Trace) -> Errors:
    before, expected = (_wholes(reference.weights[number], reference.shapes) for number in (0, step))
    moved = {name: expected[name] - before[name] for name in expected}
    yield from _of_tensors("update", step, [trace.weights[step] for trace in traces], expected, moved)


def _of_tensors(
    kind: str, step: int, ranks: list[Boxes], expected: dict[str, Tensor], sizes: dict[str, Tensor]
) -> Errors:
    """Compare every rank's boxes, copies too; the error is relative to max(|size|, 1e-3 of the norm of all sizes)."""
    whole = math.sqrt(sum(float(size.norm()) ** 2 for size in sizes.values()))
    names = {name for boxes in ranks for name in boxes}
    for name in sorted(names ^ expected.keys()):
        owner = "the run" if name in names else "the reference"
        yield kind, math.inf, f"{kind} of '{name}' at step {step}: only {owner} has it"
    for name in sorted(names & expected.keys()):
        covered, largest = torch.zeros(expected[name].shape, dtype=torch.bool), 0.0
        for boxes in ranks:
            squares = 0.0
            for start, values in boxes.get(name, []):
                place = tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))
                covered[place] = True
                squares += float((values - expected[name][place]).norm()) ** 2
            largest = max(largest, math.sqrt(squares)) if not math.isnan(squares) else math.inf
        size = max(float(sizes[name].norm()), 1e-3 * whole)
        if not bool(covered.all()):
            largest = math.inf
        sentence = f"{kind} of '{name}' at step {step} has an error of {largest:.3g}, and its norm is {size:.3g}"
        yield kind, _relative(largest, size), sentence


def _wholes(boxes: Boxes, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    found = {}
    for name, parts in boxes.items():
        found[name] = torch.full(shapes[name], math.nan, dtype=torch.float64)
        for start, values in parts:
            found[name][tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))] = values
    return found


def _relative(error: float, size: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / size if size else math.inf if error else 0.0


def worst(found: Errors) -> dict[str, tuple[float, str]]:
    """The largest error of each kind of figure, with its sentence."""
    largest: dict[str, tuple[float, str]] = {}
    for kind, error, sentence in found:
        if kind not in largest or error > largest[kind][0]:
            largest[kind] = (error, sentence)
    return largest


def failures(largest: dict[str, tuple[float, str]], bound: float = EXACT) -> list[str]:
    return [f"{sentence} (error {error:.2g})" for error, sentence in largest.values() if not error <= bound]
