"""The training loop: every step of a run from its start or a checkpoint to its end, with evaluations and saves.

`train` is called once in each process of a run, after the process has joined the others.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug.contracts.stepper import StepResult
from mplug.errors import Diverged, PluginError, UsageError
from mplug.model.invariance import layout_dependence_of_all
from mplug.registry.provided import provided
from mplug.run.activity import Activity
from mplug.run.folder import BEGAN, ENDED, logging_to, make_directory
from mplug.run.record import write_record
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug.training.beginnings import Loaded, beginnings_of
from mplug.training.faults import faults
from mplug.training.healing import Copies, copies_of, due_copies
from mplug.training.interrupt import Interrupt, TimeLeft
from mplug.training.preflight import Preflight
from mplug.training.relayouts import Relayouts
from mplug.training.report import PendingRecord, Report
from mplug.training.save_times import save_times_of
from mplug.training.saving import Position, Unsaved, position_of
from mplug.training.schedule import batch_size, learning_rate, weight_decay
from mplug.training.validation import evaluate_unless_stopped

log = logging.getLogger("mplug")
NO_TARGETS = (
    "the {} samples of the evaluation have no target, so their loss is not a number; set a larger "
    "trainer.eval_samples, use other validation data, or set trainer.eval_every=0"
)


@dataclass(frozen=True)
class Ending:
    """How training ended: the last validation loss (None if the run has none), and the reason if it stopped early."""

    val_loss: float | None = None
    signal: int | None = None
    out_of_time: bool = False
    nothing_left: bool = False
    """The checkpoint had done all steps: a launcher has restarted the processes after the last one, for example."""


def train(
    run: Run, resume_from: Path | None = None, deadline: float | None = None, allowed: tuple[str, ...] = ()
) -> Ending:
    """Train to the config's last step; evaluate and save at the config's intervals.

    With `resume_from`, the run continues from this checkpoint. If the checkpoint is not valid, the run warns and
    continues from the newest valid checkpoint before it. `allowed` names the fields and sections that the user allows
    to differ from the checkpoint.

    SIGTERM or SIGINT on any rank stops the run early, and so does `deadline` (seconds since the epoch): the run
    finishes the current step, saves, and ends. It abandons a running evaluation, which then has no result. If an
    exception ends the run, the rank's log and the hook `run_failed` receive it.
    """
    with logging_to(run), _reporting_failure(run):
        run.enter("building the model")
        parts = build(run)
        run.depends_on_layout = layout_dependence_of_all(run, parts.model)
        position = position_of(run, parts)
        run.enter("loading a checkpoint" if resume_from else "beginning the run")
        loaded, resumed_from, copies = Loaded(), None, copies_of(run)
        is_continued, choice = _continued(run, position, copies, resume_from, allowed), None
        if resume_from is not None and not is_continued:
            choice = position.choose(resume_from)
            _report(run, choice.lines())  # beside an older checkpoint, because newer ones are damaged, copies may do
            is_continued = choice.path != resume_from and _continued(run, position, copies, choice.path, allowed)
        if choice is not None and not is_continued:
            if choice.manifest["step"] == run.config.trainer.steps:
                run.step = choice.manifest["step"]
                return Ending(nothing_left=True)
            position.load(choice, allowed)
            resumed_from = choice.path
        elif not is_continued:
            loaded = _begin(run, parts)
        _write_beginning(run, parts, position, loaded, resumed_from)
        del parts  # a change of the layout replaces them
        with Interrupt(run) as interrupt, _finishing_saves_on_failure(run, position):
            preflight: Preflight | None = provided("preflights")
            samples = position.parts.train_loader.loader.samples_per_epoch
            _report(run, [] if preflight is None else preflight.data_gap(run, samples))
            run.hooks.observe("run_started", run=run)
            time_left = TimeLeft(run, deadline, position.saver.expected_seconds)
            val_loss = _steps(run, position, time_left, copies)
            run.hooks.observe("run_finished", run=run)
            log.info("%s after step %d of %d", ENDED, run.step, run.config.trainer.steps)
            if run.step == run.config.trainer.steps and (
                val_loss is not None or position.parts.validation_loader is None
            ):
                return Ending(val_loss)
            reasons = run.gathered((interrupt.signal, time_left.expired))  # one rank's reason ends all ranks alike
    stopped_by = next((number for number, _ in reasons if number is not None), None)
    return Ending(val_loss, stopped_by, out_of_time=stopped_by is None)


def _continued(run: Run, position: Position, copies: Sequence[Copies], *newest_and_allowed: Any) -> bool:
    """Continue from copies that are not older than the newest checkpoint, if a plugin has some. Collective."""
    found = next((one for one in copies if one.restore(run, position, *newest_and_allowed)), None)
    _report(run, [] if found is None else [f"the run continues after step {run.step}, from {found.source}"])
    return found is not None


def _begin(run: Run, parts: Parts) -> Loaded:
    """Load the weights and adapters that a new run begins with, if the config names any."""
    found = beginnings_of(run, parts.model)
    loaded = Loaded() if found is None else found.load(run, parts.model, parts.pieces)
    _report(run, [*loaded.lines])
    return loaded


def _write_beginning(run: Run, parts: Parts, position: Position, loaded: Loaded, resumed_from: Path | None) -> None:
    """Make the run's folder, and write into logs and record what the run starts from."""
    if run.claim is not None:
        run.claim.confirm()
    make_directory(run)
    if loaded.keep is not None:
        loaded.keep()
    log.info("%s %d of %d, process %d on %s", BEGAN, run.rank, run.mesh.world_size, os.getpid(), socket.gethostname())
    for line in position.changes.lines():
        log.info("changed since %s: %s", resumed_from, line)
    tokenizer = parts.train_loader.loader.tokenizer
    sizes = {"parameters": parts.num_parameters, "frozen": parts.num_frozen}
    facts = {"depends_on_layout": run.depends_on_layout, "changes": position.history, "tokenizer": tokenizer}
    sources = {"resumed_from": resumed_from and str(resumed_from), "pretrained": loaded.source}
    write_record(run, {**sizes, **sources, **facts})


def _report(run: Run, lines: list[str]) -> None:
    """Log lines and, on rank 0, print them to stderr."""
    for line in lines:
        log.warning("%s", line)
        if run.rank == 0:
            print(f"mplug: {line}", file=sys.stderr, flush=True)


@contextmanager
def _reporting_failure(run: Run) -> Iterator[None]:
    """Write an exception of the block to the log and call `run_failed`; an error of a plugin names the plugin."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        plugin_bug = _plugin_bug(run, error)
        with suppress(OSError):  # a full disk; the error itself reports it
            log.error("the run failed%s", f": {plugin_bug}" if plugin_bug else "", exc_info=error)
        run.hooks.observe("run_failed", run=run, error=plugin_bug or error)
        if plugin_bug is None:
            raise
        raise plugin_bug from error


def _plugin_bug(run: Run, error: BaseException) -> PluginError | None:
    """An error that names the plugin whose code raised `error`; None if no plugin's code did."""
    step = f"in step {run.step}" if run.step else "before the first step"
    found = faults()
    return None if found is None else found.plugin_error(run.hooks, error, step, f"logs/rank{run.rank}.log")


@contextmanager
def _finishing_saves_on_failure(run: Run, position: Position) -> Iterator[None]:
    """If the block fails, finish the asynchronous save in progress, provided that every rank can still take part."""
    try:
        yield
    except BaseException as error:
        if run.groups is None or isinstance(error, Diverged):  # all ranks raise Diverged at the same step
            run.enter(Activity.WRITING)
            position.saver.let_finish()
        raise


def _steps(run: Run, position: Position, time_left: TimeLeft, copies: Sequence[Copies] = ()) -> float | None:
    """Run the remaining steps; return the last validation loss.

    Each iteration launches a step, and reports the previous one while the device computes. `settle` reads the step's
    figures, and `publish` hands them to observers: an evaluation or a save comes between the two calls.
    """
    trainer, val_loss, report = run.config.trainer, None, Report(run, position)
    relayouts: Relayouts | None = None if isinstance(position, Unsaved) else provided("relayouts")
    save_times = save_times_of(run)
    for one in due_copies(copies, run, saves=False) if run.step < trainer.steps else ():
        one.keep(run, position)
    while run.step < trainer.steps and not report.stop:
        run.step += 1
        run.enter(Activity.STEP, run.step)
        run.hooks.observe("step_started", run=run)
        if relayouts is not None and run.rank == 0 and relayouts.is_requested(run):
            run.relayout_requested = True  # until it is served: on a GPU, that is after the next step
        report.follow(_step(run, position))
        last = run.step == trainer.steps
        if _is_due(run.step, trainer.eval_every) or (last and position.parts.validation_loader is not None):
            report.settle()
            run.enter(Activity.EVALUATION, run.step)
            val_loss = _evaluate(run, position.parts, report, time_left)
            report.publish(**({} if val_loss is None else {"val_loss": val_loss}))
        is_due = save_times.is_due(run)
        if not last and (due := due_copies(copies, run, report.stop or is_due)):
            began = time.monotonic()
            _let_write(run, position, report)
            run.enter(Activity.COPYING)
            for one in due:  # before a save; after a death in the last one, the end of the run is repeated
                one.keep(run, position)
            report.pause()
            save_times.exclude(time.monotonic() - began)
        if last or report.stop or is_due:
            report.settle()
            report.publish()
            began = time.monotonic()
            run.enter(Activity.WRITING)
            position.saver.wait()
            _report_saved(run, position)  # the next save may remove what observers must see
            run.enter(Activity.SAVING, run.step)
            position.save()
            if is_due and not (last or report.stop):
                save_times.saved(run, time.monotonic() - began, position.saver.expected_seconds())
        report.publish()
        report.pause()
        _report_saved(run, position)
        time_left.check()
        if relayouts is not None and report.relayout and not (last or report.stop):
            began = time.monotonic()
            _change_layout(run, position, report, relayouts)
            time_left.skip_step()
            save_times.exclude(time.monotonic() - began)
    run.enter(Activity.WRITING)
    position.saver.wait()
    run.enter("ending the run")
    _report_saved(run, position)
    preflight: Preflight | None = provided("preflights")
    vocab_size = position.parts.train_loader.vocab_size
    _report(run, [] if preflight is None else preflight.loss_warning(report.last_loss, vocab_size))
    return val_loss


def _let_write(run: Run, position: Position, report: Report) -> None:
    """Wait until the last step is reported and no save is under way, whose group the ranks are about to use."""
    report.settle()
    report.publish()
    run.enter(Activity.WRITING)
    position.saver.wait()
    _report_saved(run, position)


def _change_layout(run: Run, position: Position, report: Report, relayouts: Relayouts) -> None:
    """Let the run have another layout from the next step on."""
    _let_write(run, position, report)
    run.enter(Activity.RELAYOUT)
    relayouts.change(run, position)
    report.relayout = run.relayout_requested = False
    report.pause()


def _evaluate(run: Run, parts: Parts, report: Report, time_left: TimeLeft) -> float | None:
    """The validation loss; None if a rank asked the run to stop, before the evaluation or during it."""
    if report.stop:
        return None
    start = time.time()
    evaluation = evaluate_unless_stopped(run, parts, time_left.ends_within)
    time_left.exclude(time.time() - start)
    report.stop = evaluation.stop
    if not evaluation.has_targets:
        _report(run, [NO_TARGETS.format(run.config.trainer.eval_samples)])
    return evaluation.loss


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step(run: Run, position: Position) -> PendingRecord:
    """Launch a step. The CPU does not wait for the device."""
    config, step, parts = run.config, run.step, position.parts
    samples = batch_size(position.samples, config.trainer, config.schedule.batch_rampup)
    lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
    decay = weight_decay(step, config.optimizer.weight_decay, config.schedule.weight_decay, config.trainer.steps)
    result, wait_seconds = launch_step(run, parts, samples, lr, decay)
    position.samples += samples
    of_data = {"data_wait_s": wait_seconds, **parts.train_loader.imbalances()}
    return PendingRecord(result, run.device, step, samples, lr, of_data)


def launch_step(run: Run, parts: Parts, samples: int, lr: float, decay: float) -> tuple[StepResult, float]:
    """Launch the step `run.step`; return its result and the seconds that the CPU waited for the data loader."""
    micro_batches = parts.train_loader.take(samples)
    parts.stepper.forward_backward(micro_batches, run.step)
    result = parts.stepper.update(lr, decay)
    return result, micro_batches.wait_seconds


def _report_saved(run: Run, position: Position) -> None:
    for path in position.saver.saved():
        run.hooks.observe("checkpoint_saved", run=run, path=path)
