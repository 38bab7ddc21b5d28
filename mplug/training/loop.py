"""The training loop."""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mplug.checkpoint.pretrained import load_weights, newest_pretrained
from mplug.contracts import StepResult
from mplug.distributed.heartbeats import EVALUATION, SAVING, STEP, WRITING
from mplug.errors import Diverged, PluginError, UsageError
from mplug.model.variance import layout_dependence_of_all
from mplug.registry.blame import plugin_error
from mplug.run.folder import logging_to, make_directory
from mplug.run.record import write_record
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug.training.evaluation import evaluate_unless_stopped
from mplug.training.figures import Figures, Report, Underway
from mplug.training.interrupt import Interrupt, TimeLeft
from mplug.training.position import Position
from mplug.training.schedule import batch_size, learning_rate, weight_decay

log = logging.getLogger("mplug")


@dataclass(frozen=True)
class Ending:
    """How training ended: the last validation loss, if the run has one, and what stopped it early, if something did."""

    val_loss: float | None = None
    signal: int | None = None
    out_of_time: bool = False
    nothing_left: bool = False
    """The checkpoint had done all steps: a launcher has restarted the processes after the last one, for example."""


def train(
    run: Run, resume_from: Path | None = None, deadline: float | None = None, allowed: tuple[str, ...] = ()
) -> Ending:
    """Train to the config's last step, evaluating and saving on the way; continue from a checkpoint if one is given.

    Where that checkpoint is not valid, the run continues from the newest valid one before it, and says so. `allowed`
    are the fields and sections whose change since the checkpoint the user lets happen.

    SIGTERM and SIGINT, on any rank, finish the step, save, and end the run; so does time, before `deadline` (seconds
    since the epoch). They leave an evaluation that is under way, and it has no result. What else ends the run is told
    in the log of the rank and to observers.
    """
    with logging_to(run), _telling_of_failure(run):
        run.pulse.enter("building the model")
        parts = build(run)
        run.depends_on_layout = layout_dependence_of_all(run, parts.model)
        position = Position(run, parts)
        run.pulse.enter("loading a checkpoint" if resume_from else "beginning the run")
        pretrained = newest_pretrained(run) if resume_from is None else None
        if resume_from is not None:
            choice = position.choose(resume_from)
            resume_from = choice.path
            _report(run, choice.lines())
            if choice.manifest["step"] == run.config.trainer.steps:
                run.step = choice.manifest["step"]
                return Ending(nothing_left=True)
            position.load(choice, allowed)
        elif pretrained is not None:
            choice = load_weights(run, parts.model, parts.pieces, pretrained)
            pretrained = choice.path
            _report(run, choice.lines("beginning with the weights of"))
        if run.claim is not None:
            run.claim.confirm()
        make_directory(run)
        log.info("rank %d of %d, process %d on %s", run.rank, run.mesh.world_size, os.getpid(), socket.gethostname())
        sources = {"resumed_from": resume_from and str(resume_from), "pretrained": pretrained and str(pretrained)}
        tokenizer = getattr(parts.train_loader.loader, "tokenizer", None)
        for line in position.changes.lines():
            log.info("changed since %s: %s", resume_from, line)
        sizes = {"parameters": parts.num_parameters, "frozen": parts.num_frozen}
        facts = {"depends_on_layout": run.depends_on_layout, "changes": position.history, "tokenizer": tokenizer}
        write_record(run, {**sizes, **sources, **facts})
        with Interrupt(run) as interrupt, _letting_saves_finish(run, position):
            run.hooks.observe("run_started", run=run)
            time_left = TimeLeft(run, deadline, position.saver.expected_seconds)
            val_loss = _steps(run, parts, position, time_left)
            run.hooks.observe("run_finished", run=run)
            if run.step == run.config.trainer.steps and (val_loss is not None or parts.validation_loader is None):
                return Ending(val_loss)
            reasons = run.gathered((interrupt.signal, time_left.asked))  # any rank's, told alike by all
    stopped_by = next((number for number, _ in reasons if number is not None), None)
    return Ending(val_loss, stopped_by, out_of_time=stopped_by is None)


def _report(run: Run, lines: list[str]) -> None:
    """Write lines to the log and, once for all ranks, to stderr."""
    for line in lines:
        log.warning("%s", line)
        if run.rank == 0:
            print(f"mplug: {line}", file=sys.stderr, flush=True)


@contextmanager
def _telling_of_failure(run: Run) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        named = _blamed(run, error)
        with suppress(OSError):  # a full disk, of which the error tells already
            log.error("the run failed%s", f": {named}" if named else "", exc_info=error)
        run.hooks.observe("run_failed", run=run, error=named or error)
        if named is None:
            raise
        raise named from error


def _blamed(run: Run, error: BaseException) -> PluginError | None:
    """The sentence that names the plugin with the bug, where one has raised this."""
    step = f"in step {run.step}" if run.step else "before the first step"
    return plugin_error(run.hooks, error, step, f"logs/rank{run.rank}.log")


@contextmanager
def _letting_saves_finish(run: Run, position: Position) -> Iterator[None]:
    """A checkpoint that is being written is still wanted when the run fails, if no other process ends before it is."""
    try:
        yield
    except BaseException as error:
        if run.groups is None or isinstance(error, Diverged):  # which all raise alike
            run.pulse.enter(WRITING)
            position.saver.let_finish()
        raise


def _steps(run: Run, parts: Parts, position: Position, time_left: TimeLeft) -> float | None:
    """Every step: launch it, tell of the one before it, and now and then evaluate and save."""
    trainer, val_loss, report = run.config.trainer, None, Report(run, parts, position)
    while run.step < trainer.steps and not report.stop:
        run.step += 1
        run.pulse.enter(STEP, run.step)
        run.hooks.observe("step_started", run=run)
        report.follow(_step(run, parts, position))
        last = run.step == trainer.steps
        if _due(run.step, trainer.eval_every) or (last and parts.validation_loader is not None):
            report.settle()
            run.pulse.enter(EVALUATION, run.step)
            val_loss = _evaluate(run, parts, report, time_left)
            report.tell(**({} if val_loss is None else {"val_loss": val_loss}))
        if last or report.stop or _due(run.step, run.config.checkpoint.every):
            report.settle()
            report.tell()
            run.pulse.enter(WRITING)
            position.saver.wait()
            run.pulse.enter(SAVING, run.step)
            position.save()
        report.tell()
        report.pause()
        _tell_of_saved(run, position)
        time_left.check()
    run.pulse.enter(WRITING)
    position.saver.wait()
    run.pulse.enter("ending the run")
    _tell_of_saved(run, position)
    return val_loss


def _evaluate(run: Run, parts: Parts, report: Report, time_left: TimeLeft) -> float | None:
    """The validation loss; None if the run is to stop, before the evaluation or while it goes on."""
    if report.stop:
        return None
    began = time.time()
    found = evaluate_unless_stopped(run, parts, time_left.ends_within)
    time_left.leave_out(time.time() - began)
    report.stop = found.stop
    return found.loss


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step(run: Run, parts: Parts, position: Position) -> Underway:
    """Launch a step: nothing here waits for the device."""
    config, step = run.config, run.step
    samples = batch_size(position.samples, config.trainer, config.schedule.batch_rampup)
    lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
    decay = weight_decay(step, config.optimizer.weight_decay, config.schedule.weight_decay, config.trainer.steps)
    result, waited = launch_step(run, parts, samples, lr, decay)
    position.samples += samples
    return Underway(step, samples, lr, waited, Figures(result, run.device))


def launch_step(run: Run, parts: Parts, samples: int, lr: float, decay: float) -> tuple[StepResult, float]:
    """Launch the step `run.step`: its figures, and the seconds that its micro batches were waited for."""
    micro_batches = parts.train_loader.take(samples)
    parts.stepper.forward_backward(micro_batches, run.step)
    result = parts.stepper.update(lr, decay)
    run.hooks.call.parameters_updated(run=run)
    return result, micro_batches.waited


def _tell_of_saved(run: Run, position: Position) -> None:
    for path in position.saver.saved():
        run.hooks.observe("checkpoint_saved", run=run, path=path)
