"""The training loop."""

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from mplug import checkpoint
from mplug.build import Parts, build
from mplug.contracts import Loader, MicroBatch, Record, StepResult
from mplug.errors import RunError, UsageError
from mplug.hardware import peak_memory_gib, peak_tflops, synchronize
from mplug.run import Run, open_directory, provenance, write_record
from mplug.schedule import batch_size, learning_rate, weight_decay


@dataclass
class Outcome:
    """How a run ended: its last validation loss, if it has one, and the signal that stopped it early, if one did."""

    val_loss: float | None
    signal: int | None


def train(run: Run, resume_from: Path | None = None) -> Outcome:
    """Train to the config's last step, saving and evaluating on the way; continue from a checkpoint if one is given.

    SIGTERM and SIGINT finish the step, save, and end the run.
    """
    parts, loader = build(run), _loader(run, "train")
    position = Position(run, parts, loader)
    if resume_from is not None:
        position.load(resume_from)
    open_directory(run)
    write_record(run, {"parameters": _count(parts), "resumed_from": str(resume_from) if resume_from else None})
    run.hooks.observe("run_started", run=run)
    try:
        with Interrupt() as interrupt:
            val_loss = _steps(run, parts, loader, position, interrupt)
    except BaseException as error:
        run.hooks.observe("run_failed", run=run, error=error)
        raise
    run.hooks.observe("run_finished", run=run)
    return Outcome(val_loss, interrupt.signal)


def _steps(run: Run, parts: Parts, loader: Loader, position: "Position", interrupt: "Interrupt") -> float | None:
    trainer, val_loss = run.config.trainer, None
    while run.step < trainer.steps and interrupt.signal is None:
        run.step += 1
        run.hooks.observe("step_started", run=run)
        record = _step(run, parts, loader, position)
        if _due(run.step, trainer.eval_every, trainer.steps):
            record["val_loss"] = val_loss = evaluate(run, parts)
        run.hooks.observe("step_finished", run=run, record=record)
        if _due(run.step, run.config.checkpoint.every, trainer.steps, ends_only=True) or interrupt.signal is not None:
            path = position.save()
            run.hooks.observe("checkpoint_saved", run=run, path=path)
    return val_loss


def _due(step: int, every: int, last: int, ends_only: bool = False) -> bool:
    if every == 0:
        return ends_only and step == last
    return step % every == 0 or step == last


def _step(run: Run, parts: Parts, loader: Loader, position: "Position") -> Record:
    config, step = run.config, run.step
    samples = batch_size(position.samples, config.trainer, config.schedule.batch_rampup)
    lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
    decay = weight_decay(step, config.optimizer.weight_decay, config.schedule.weight_decay, config.trainer.steps)
    began, waited = time.perf_counter(), Waited(loader.take(samples))
    parts.stepper.forward_backward(waited, step)
    result = parts.stepper.update(lr, decay)
    run.hooks.call.parameters_updated(run=run)
    synchronize(run.device)
    seconds = time.perf_counter() - began
    position.samples += samples
    return _record(run, parts, position, result, lr, samples, seconds, waited.seconds)


def _record(
    run: Run,
    parts: Parts,
    position: "Position",
    result: StepResult,
    lr: float,
    samples: int,
    seconds: float,
    wait: float,
) -> Record:
    loss, grad_norm = float(result.loss), float(result.grad_norm)
    if result.skipped:
        raise RunError(
            f"step {run.step} has a loss of {loss} and a gradient norm of {grad_norm}; no weight was changed by it. "
            f"Resume from an earlier checkpoint with a lower optimizer.lr, or look at the data of this step"
        )
    position.tokens += int(result.tokens)
    length, world_size = run.config.trainer.seq_length, run.mesh.world_size
    tflops = parts.model.plan.flops.of(samples * length, samples * length**2) / seconds / 1e12 / world_size
    peak = peak_tflops(run.device)
    return {
        "step": run.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": position.tokens,
        "tokens_per_s": samples * length / seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "memory_gib": peak_memory_gib(run.device),
        "data_wait_s": wait,
    }


def evaluate(run: Run, parts: Parts) -> float:
    """The mean validation loss, in nats a token, over the same `trainer.eval_samples` samples every time."""
    loader = _loader(run, "validation")
    return float(parts.stepper.evaluate(loader.take(run.config.trainer.eval_samples)))


def _loader(run: Run, split: str) -> Loader:
    loader: Loader = run.hooks.call.build_loader(run=run, split=split)
    vocab_size = getattr(run.config.model, "vocab_size", None)
    if vocab_size is not None and loader.vocab_size > vocab_size:
        raise UsageError(
            f"the data has tokens up to {loader.vocab_size - 1}, and model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={loader.vocab_size} or more"
        )
    return loader


def _count(parts: Parts) -> int:
    return sum(parameter.numel() for parameter in parts.model.parameters().values())


class Position:
    """How far a run has come, and how that is saved and loaded."""

    def __init__(self, run: Run, parts: Parts, loader: Loader) -> None:
        self.run, self.parts, self.loader = run, parts, loader
        self.samples = self.tokens = 0

    def save(self) -> Path:
        """Write the checkpoint of the current step."""
        run = self.run
        states: dict[str, Any] = {}
        for _, found in run.hooks.each("state", run=run):
            states |= {name: stateful.state_dict() for name, stateful in found.items()}
        facts = {
            "samples": self.samples,
            "tokens": self.tokens,
            "loader": self.loader.state_dict(),
            "states": states,
            "provenance": provenance(run),
            "config": run.config.resolved(),
        }
        keep = run.config.checkpoint.keep
        return checkpoint.save(run.checkpoints, run.step, self.parts.pieces, self.parts.optimizer, facts, keep)

    def load(self, path: Path) -> None:
        """Continue exactly where a checkpoint was taken."""
        manifest, run = checkpoint.read_manifest(path), self.run
        model = self.parts.model
        checkpoint.load_weights(path, model.parameters(), model.placements, run.rank)
        checkpoint.load_optimizer(path, self.parts.pieces, self.parts.optimizer, run.rank)
        for _, found in run.hooks.each("state", run=run):
            for name, stateful in found.items():
                stateful.load_state_dict(manifest["states"][name])
        self.loader.load_state_dict(manifest["loader"])
        run.step, self.samples, self.tokens = manifest["step"], manifest["samples"], manifest["tokens"]


class Waited:
    """Micro batches, and the seconds that were spent waiting for them."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self._micro_batches = iter(micro_batches)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        began = time.perf_counter()
        try:
            return next(self._micro_batches)
        finally:
            self.seconds += time.perf_counter() - began


class Interrupt:
    """Remembers the first SIGINT or SIGTERM, so that the loop ends after a whole step; a second one ends it at once."""

    signal: int | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._previous[signal.Signals(number)])
