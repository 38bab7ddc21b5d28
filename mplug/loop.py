"""The training loop."""

import logging
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mplug.build import Parts, build
from mplug.contracts import MicroBatch, Record, StepResult
from mplug.errors import RunError
from mplug.hardware import peak_memory_gib, peak_tflops, synchronize
from mplug.interrupt import Interrupt
from mplug.position import Position
from mplug.run import Run, logging_to, make_directory, write_record
from mplug.schedule import batch_size, learning_rate, weight_decay

log = logging.getLogger("mplug")


def train(run: Run, resume_from: Path | None = None) -> tuple[float | None, int | None]:
    """Train to the config's last step, evaluating and saving on the way; continue from a checkpoint if one is given.

    SIGTERM and SIGINT, on any rank, finish the step, save, and end the run. Returns the last validation loss, if the
    run has one, and the signal that stopped it early, if one did.
    """
    parts = build(run)
    position = Position(run, parts)
    if resume_from is not None:
        position.load(resume_from)
    make_directory(run)
    write_record(run, {"parameters": parts.num_parameters, "resumed_from": resume_from and str(resume_from)})
    with logging_to(run), Interrupt(run) as interrupt:
        run.hooks.observe("run_started", run=run)
        try:
            val_loss = _steps(run, parts, position)
        except BaseException as error:
            log.error("the run failed", exc_info=error)
            run.hooks.observe("run_failed", run=run, error=error)
            raise
        run.hooks.observe("run_finished", run=run)
    done = run.step == run.config.trainer.steps
    return val_loss, None if done else interrupt.signal or signal.SIGTERM


def _steps(run: Run, parts: Parts, position: Position) -> float | None:
    steps, val_loss, stop = run.config.trainer.steps, None, False
    while run.step < steps and not stop:
        run.step += 1
        run.hooks.observe("step_started", run=run)
        record, stop = _step(run, parts, position)
        last = run.step == steps
        if _due(run.step, run.config.trainer.eval_every, last and parts.validation_loader is not None):
            record["val_loss"] = val_loss = evaluate(run, parts)
        run.hooks.observe("step_finished", run=run, record=record)
        if _due(run.step, run.config.checkpoint.every, last or stop):
            run.hooks.observe("checkpoint_saved", run=run, path=position.save())
    return val_loss


def _due(step: int, every: int, anyway: bool) -> bool:
    return anyway or (every > 0 and step % every == 0)


def _step(run: Run, parts: Parts, position: Position) -> tuple[Record, bool]:
    config, step = run.config, run.step
    samples = batch_size(position.samples, config.trainer, config.schedule.batch_rampup)
    lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
    decay = weight_decay(step, config.optimizer.weight_decay, config.schedule.weight_decay, config.trainer.steps)
    began, micro_batches = time.perf_counter(), Waited(parts.train_loader.take(samples))
    parts.stepper.forward_backward(micro_batches, step)
    result = parts.stepper.update(lr, decay)
    run.hooks.call.parameters_updated(run=run)
    synchronize(run.device)
    seconds = time.perf_counter() - began
    _refuse_nonfinite(run, result)
    position.samples += samples
    position.tokens += int(result.tokens)
    record = {
        "step": step,
        "loss": float(result.loss),
        "grad_norm": float(result.grad_norm),
        "lr": lr,
        "tokens": position.tokens,
        **_speed(run, parts, samples, seconds),
        "memory_gib": peak_memory_gib(run.device),
        "data_wait_s": micro_batches.waited,
    }
    return record, bool(result.stop)


def _refuse_nonfinite(run: Run, result: StepResult) -> None:
    if result.skipped:
        raise RunError(
            f"step {run.step} has a loss of {float(result.loss)} and a gradient norm of {float(result.grad_norm)}; no "
            f"weight was changed by it. Resume with a lower optimizer.lr, or look at the data of this step"
        )


def _speed(run: Run, parts: Parts, samples: int, seconds: float) -> Record:
    length = run.config.trainer.seq_length
    flops = parts.model.plan.flops.of(samples * length, samples * length**2)
    tflops, peak = flops / seconds / 1e12 / run.mesh.world_size, peak_tflops(run.device)
    return {"tokens_per_s": samples * length / seconds, "tflops": tflops, "mfu": tflops / peak if peak else None}


def evaluate(run: Run, parts: Parts) -> float:
    """The mean validation loss in nats a token, over the same `trainer.eval_samples` samples every time."""
    loader = parts.validation_loader
    assert loader is not None
    beginning = loader.state_dict()
    loss = float(parts.stepper.evaluate(loader.take(run.config.trainer.eval_samples)))
    loader.load_state_dict(beginning)
    return loss


class Waited:
    """Micro batches, and the seconds that were `waited` for them."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self._micro_batches = iter(micro_batches)
        self.waited = 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        began = time.perf_counter()
        try:
            return next(self._micro_batches)
        finally:
            self.waited += time.perf_counter() - began
