"""The work of `mplug evaluate` in each of its processes: load the weights, run the samples forward.

The command imports this module before it has checked its options, so functions import torch themselves.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mplug import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Model, Run, RunConfig, Stepper
    from mplug.commands import Settings
    from mplug_evaluate.documents import Documents
    from mplug_evaluate.hits import Shares
    from mplug_pretrained import SavedModel

LABEL = "evaluate"


@dataclass(frozen=True)
class Job:
    """What each process does: plain data that can be pickled.

    Without `documents`, it evaluates `samples` samples of a split of the run's loader: a number, 'all', or None for
    `trainer.eval_samples`.
    """

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    documents: "Sequence[Documents] | None"
    stride: int | None
    split: str
    samples: int | str | None
    accuracy: bool = False


@dataclass(frozen=True)
class Measured:
    """The mean loss of some targets, in nats per token. `num_bytes` is None if the bytes of the text are unknown.

    `shares` is None if the accuracy was not asked for. `figures` are those of an objective that computed the loss.
    """

    name: str
    num_documents: int | None
    num_tokens: int
    loss: float
    num_bytes: int | None = None
    shares: "Shares | None" = None
    figures: "Mapping[str, float]" = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of the text."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class Found:
    """The result of an evaluation, and what was evaluated."""

    rows: tuple[Measured, ...]
    weights: str
    averages: bool
    """Whether the values are averages of the weights."""
    layout: str
    precision: str
    seq_length: int
    stride: int | None
    objective: str | None = None
    """The plugin that computed the loss of the training in place of the model's own; None: the model's own loss."""
    has_scores: bool = False
    """Whether the loss of the evaluation is that of this plugin too, because the model computes scores."""

    @property
    def total(self) -> Measured:
        """All rows together: the mean over all tokens."""
        tokens = sum(one.num_tokens for one in self.rows)
        loss = sum(one.loss * one.num_tokens for one in self.rows) / tokens
        documents, sizes = [one.num_documents for one in self.rows], [one.num_bytes for one in self.rows]
        return Measured("total", _sum(documents), tokens, loss, _sum(sizes))


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [one for one in numbers if one is not None]
    return sum(known) if len(known) == len(numbers) else None


def evaluate(job: Job, send: Callable[..., None] | None = None) -> Found:  # the launcher passes it
    """Evaluate as one process; all processes get the same result."""
    from mplug.commands import among, launched

    run, world = prepared(job), launched()
    with among(world, run):
        return measured(run, job)


def prepared(job: Job) -> "Run":
    """The run, which evaluates instead of training; UsageError if the stride would leave tokens out."""
    from mplug.commands import Registry, choose_device, prepare, resolve

    run = prepare(resolve(Registry(), job.base, job.overrides))
    run.trains, run.device = False, choose_device(run.config)
    length = run.config.trainer.seq_length
    if job.stride is not None and job.stride > length:
        raise UsageError(f"--stride {job.stride} is more than the {length} tokens of a sequence; use at most {length}")
    label, computes = scores_of(run.config)
    if label and job.accuracy:
        raise UsageError(f"--accuracy counts tokens, and the model computes {computes}; {label} has figures of its own")
    if job.documents is not None:
        run.entries = frozenset()
    return run


def refuse_texts(config: "RunConfig", file: "Path") -> None:
    """Raise UsageError for a file of text if the model computes scores."""
    label, computes = scores_of(config)
    if label:
        field = "validation_path" if hasattr(config.data, "validation_path") else "path"
        raise UsageError(
            f"the model computes {computes} ({label}), and '{file}' would be read as a text; leave it out to evaluate "
            f"the run's own held-out data, or let the run's loader read it: --set data.{field}={file} --samples all"
        )


def measured(run: "Run", job: Job) -> Found:
    """The result of a prepared run, on each of its ranks. Collective."""
    from mplug.commands import allocate_forward, forward_stepper

    model = job.weights.load(run, allocate_forward)
    _refuse_missing_streams(run, model)
    has_scores = _computes_scores(run, model)
    if job.documents is not None:
        _refuse_later_tokens(run, model)
    stepper, length = forward_stepper(run, model), run.config.trainer.seq_length
    if job.documents is None:
        rows, stride = [_of_data(run, model, stepper, job)], None
    else:
        stride = job.stride or length
        rows = list(_of_files(run, model, stepper, job.documents, stride))
    trainer, layout = run.config.trainer, run.config.parallel.layout
    weights = job.weights
    return Found(
        tuple(rows),
        str(weights.path),
        weights.uses_averages(run),
        layout,
        trainer.precision,
        length,
        stride,
        objective_of(run.config),
        has_scores,
    )


def scores_of(config: "RunConfig") -> tuple[str, str]:
    """(the label of the objective, what it computes) if a model computes scores, not logits; else empty texts."""
    found = ((one.label, getattr(one.plugin, "computes", "")) for one in config.chosen)
    return next((one for one in found if one[1]), ("", ""))


def _computes_scores(run: "Run", model: "Model") -> bool:
    """Whether the model ends in the loss of scores. UsageError if an objective puts it into models that train alone."""
    label, computes = scores_of(run.config)
    unit = next(unit for unit in model.plan.units if "loss" in unit.outputs)
    if computes and not any(name.startswith(f"{unit.name}.loss.") for name in model.plan.parameters):
        raise UsageError(
            f"{label} computes {computes} in training alone, so there is no loss of them to measure; the plugin can "
            f"serve evaluations by mplug_nn.replace_end"
        )
    return bool(computes)


def objective_of(config: "RunConfig") -> str | None:
    """The label of the plugin that computes the loss of a run's training, if it is not the model's own loss."""
    return next((one.label for one in config.chosen if one.section[0] == "objectives"), None)


def _refuse_missing_streams(run: "Run", model: "Model") -> None:
    """Raise UsageError if units need entries of a stream, such as pictures, and the samples have none."""
    needed = {name for unit in model.plan.units for name in unit.inputs} & model.plan.stream_entries
    if missing := sorted(needed - run.entries):
        raise UsageError(
            f"the model needs '{missing[0]}' in every sample, which files of text do not have; evaluate it on the "
            f"samples of a loader that supplies them (--data)"
        )


def _refuse_later_tokens(run: "Run", model: "Model") -> None:
    """Raise UsageError for an encoder: it sees the token that it would predict."""
    from mplug_sampling.sampler import cached_modules, sees_later_tokens

    if sees_later_tokens(cached_modules(model)):
        (owner,) = run.hooks.implementers("build_model")
        raise UsageError(
            f"attention of {owner} sees later tokens, so it knows the next token of a text; leave the files out, and "
            f"evaluate the model on the samples of a loader (--data)"
        )


def _of_files(
    run: "Run", model: "Model", stepper: "Stepper", files: "Sequence[Documents]", stride: int
) -> Iterator[Measured]:
    from mplug import MapLoader
    from mplug.commands import feed
    from mplug_evaluate.windows import Windows
    from mplug_validation import CountedTargets

    for file in files:
        windows = Windows(file.tokens, run.config.trainer.seq_length, stride)
        loader = MapLoader(
            windows.read,
            vocab_size=1 + max(max(tokens) for tokens in file.tokens if tokens),
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )
        counted = CountedTargets(feed(run, model, str(file.path), loader).take_evenly(windows.count), run)
        loss = float(stepper.evaluate(counted))
        assert counted.total() == file.num_targets, "every token is predicted once"
        yield Measured(str(file.path), len(file.tokens), file.num_targets, loss, file.num_bytes)


def _of_data(run: "Run", model: "Model", stepper: "Stepper", job: Job) -> Measured:
    from mplug.commands import feed
    from mplug_evaluate.hits import Hits
    from mplug_validation import CountedTargets, Figures

    source = feed(run, model, job.split)
    (label,) = run.hooks.implementers("build_loader")
    samples = run.config.trainer.eval_samples if job.samples is None else job.samples
    if isinstance(samples, str):
        epoch = getattr(source.loader, "samples_per_epoch", None)
        if epoch is None:
            raise UsageError(f"{label} does not state how many samples it has; use --samples with a number")
        samples = epoch
    hits = Hits(run, model, stepper, source.take_evenly(samples)) if job.accuracy else None
    counted = CountedTargets(source.take_evenly(samples) if hits is None else hits, run)
    figures = Figures(run, model)
    figures.begin()
    loss = float(stepper.evaluate(counted))
    targets = counted.total()
    if not targets:
        raise UsageError(f"{samples} samples of {label} have no target; use more samples")
    shares = None if hits is None else hits.shares()
    name, means = f"{label}, {job.split}: {samples} samples", figures.means(targets)
    return Measured(name, None, targets, loss, None, shares, means if scores_of(run.config)[0] else {})
