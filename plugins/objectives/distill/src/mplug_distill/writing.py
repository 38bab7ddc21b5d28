"""The work of `mplug teach`: run the teacher forward over samples, and write its largest probabilities."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from mplug import IGNORED, UsageError
from mplug.commands import Registry, allocate_forward, among, choose_device, feed, forward_stepper, prepare, resolve
from mplug_distill.taught import fingerprint
from mplug_distill.top_file import Origin, digest, written

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Run
    from mplug.commands import Settings
    from mplug_pretrained import SavedModel

AT_ONCE = 1 << 26
"""Logits that are widened at a time."""


@dataclass(frozen=True)
class Job:
    """What is written: `samples` is a number, or 'all' for one epoch."""

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    split: str
    samples: int | str
    k: int
    dtype: str
    output: Path


def prepared(job: Job) -> "Run":
    """The run, which computes forward. UsageError unless it is one process, or if k is too large."""
    run = prepare(resolve(Registry(), job.base, job.overrides))
    run.trains, run.device = False, choose_device(run.config)
    if run.mesh.world_size > 1:
        raise UsageError("'mplug teach' runs the teacher in one process; leave --parallel out")
    size = getattr(run.config.model, "vocab_size", job.k)
    if job.k > size:
        raise UsageError(
            f"--top {job.k} is more than the {size} tokens of the model (model.vocab_size); use at most that"
        )
    return run


def teach(job: Job) -> tuple[int, int]:
    """Write the file; returns the numbers of samples and of targets."""
    run = prepared(job)
    with among(None, run):
        model = job.weights.load(run, allocate_forward)
        if not model.plan.inference:
            raise UsageError("'mplug teach' needs the logits of tokens, and the plan of this model has none")
        stepper, source = forward_stepper(run, model), feed(run, model, job.split)
        number, inner, trainer = _number(run, job, source.loader), source.loader, run.config.trainer
        tokenizer = fingerprint(run.hooks.call.build_tokenizer(run=run))
        size = int(getattr(run.config.model, "vocab_size", inner.vocab_size))
        fixed = (job.k, size, tokenizer, inner.fingerprint, job.split, trainer.seed, trainer.seq_length)
        targets, place = 0, 0
        with written(job.output, Origin(*fixed), job.dtype) as writer, _bar(number) as bar:
            for batch in source.take(number):
                logits = model.logits(stepper.entries(batch, run.step))
                for row, ids in enumerate(batch["sample_ids"].tolist()):
                    if ids != place:
                        raise UsageError(
                            f"the data have sample {ids} at the place of {place}, so their order is unknown"
                        )
                    tokens, labels = (batch[name][row] for name in ("tokens", "labels"))
                    top, logs = largest(logits[row][labels != IGNORED], job.k)
                    arrays = (one.cpu().numpy() for one in (top, logs))
                    writer.add(digest(tokens.cpu().numpy(), labels.cpu().numpy()), *arrays)
                    targets, place = targets + len(top), place + 1
                bar.update(len(batch["sample_ids"]))
    return place, targets


def _bar(number: int) -> "click._termui_impl.ProgressBar[int]":
    return click.progressbar(length=number, label="samples", file=sys.stderr)


def _number(run: "Run", job: Job, loader: object) -> int:
    if isinstance(job.samples, int):
        return job.samples
    number: int | None = getattr(loader, "samples_per_epoch", None)
    if number is None:
        (label,) = run.hooks.implementers("build_loader")
        raise UsageError(f"{label} does not state how many samples it has; use --samples with a number")
    return number


@torch.no_grad()
def largest(logits: "Tensor", k: int) -> "tuple[Tensor, Tensor]":
    """logits [N, V] -> (the k most probable tokens [N, k], their log-probabilities and that of the others [N, k + 1]).

    The log-probability of the others is minus infinity if there are none. In fp32 or wider.
    """
    found = [_largest(part, k) for part in logits.split(max(1, AT_ONCE // logits.shape[1]))]
    tokens, logs = zip(*found, strict=True)
    return torch.cat(tokens).int(), torch.cat(logs)


def _largest(logits: "Tensor", k: int) -> "tuple[Tensor, Tensor]":
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, tokens = wide.topk(k, dim=-1)
    others = wide.scatter(1, tokens, float("-inf")).logsumexp(dim=-1, keepdim=True)
    return tokens, torch.cat((values, others), dim=1) - wide.logsumexp(dim=-1, keepdim=True)
