"""The work of `mplug teach` in each of its processes: run the teacher forward, and write its largest probabilities.

Every rank that has a teacher's last unit computes those of its samples. Rank 0 gathers them, and writes the file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
import torch.distributed as dist
from numpy.typing import NDArray

from mplug import IGNORED, TOP_TAUGHT, TOP_TOKENS, UsageError
from mplug.commands import (
    COMMAND,
    Registry,
    allocate_forward,
    among,
    choose_device,
    feed,
    forward_stepper,
    launched,
    merge,
    prepare,
    resolve,
)
from mplug_distill.shown import shown
from mplug_distill.taught import fingerprint
from mplug_distill.teacher import Teacher
from mplug_distill.top_file import Origin, digest
from mplug_distill.top_writer import TopWriter, written

if TYPE_CHECKING:
    from mplug import Loader, Model, RankBatch, Run
    from mplug.commands import Settings
    from mplug_pretrained import SavedModel

AHEAD = 4
"""Micro batches of a round for each stage of a pipeline, so that the stages compute at the same time."""
UNRELATED = (("parallel",), ("trainer", "device"), ("trainer", "global_batch_size"))
"""The settings that do not matter to what the file has: an interrupted command may continue under another layout."""


@dataclass(frozen=True)
class Job:
    """What is written: `samples` is a number, or 'all' for one epoch. Plain data that can be pickled."""

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    split: str
    samples: int | str
    k: int
    dtype: str
    output: Path
    restart: bool = False


class Sample(NamedTuple):
    """The results of a sample with t targets: `tokens` [t, k], `logs` [t, k + 1]."""

    number: int
    digest: int
    tokens: NDArray[Any]
    logs: NDArray[Any]


def prepared(job: Job) -> "Run":
    """The run, which computes forward. UsageError if ranks divide the positions of a sample, or if k is too large."""
    config = resolve(Registry(), job.base, job.overrides)
    run = prepare(config, {f"{COMMAND}teach": Teacher(job.k)})
    run.trains, run.device = False, choose_device(run.config)
    for axis in run.mesh.axes.values():
        if axis.size > 1 and {*axis.entries} - {"batch"}:
            raise UsageError(
                f"--parallel '{run.config.parallel.layout}': {axis.name}={axis.size} divides the positions of a "
                f"sample, and 'mplug teach' writes whole samples; use a layout that divides the samples (dp, fsdp) or "
                f"the model (tp, pp)"
            )
    size = getattr(run.config.model, "vocab_size", job.k)
    if job.k > size:
        raise UsageError(
            f"--top {job.k} is more than the {size} tokens of the model (model.vocab_size); use at most that"
        )
    return run


def teach(job: Job, send: Callable[..., None] | None = None) -> tuple[int, int]:  # the launcher passes it
    """Write the file as one of the processes; returns the numbers of samples and of targets (of rank 0)."""
    run, world = prepared(job), launched()
    with among(world, run):
        return taught(run, job)


def taught(run: "Run", job: Job) -> tuple[int, int]:
    """Write the file of a prepared run, on each of its ranks. Collective."""
    model = job.weights.load(run, allocate_forward)
    rounds = Rounds(run, model, job)
    with _file(run, job, rounds) as writer, shown(rounds.number if writer else None) as advance:
        done, digests = _shared(run, (0, []) if writer is None else (writer.num_samples, writer.digests))
        if done and not run.rank:
            click.echo(f"an interrupted command has written {done:,} samples, which are kept", err=True)
        rounds.skip(digests)
        advance(done)
        for found in rounds.results(done):
            if writer is not None:
                for sample in found:
                    writer.add(*sample[1:])
                advance(len(found))
        return rounds.number, 0 if writer is None else sum(writer.counts)


@contextmanager
def _file(run: "Run", job: Job, rounds: "Rounds") -> "Iterator[TopWriter | None]":
    """The writer on rank 0, which begins with the samples that an interrupted command has left; None elsewhere."""
    if run.rank:
        yield None
        return
    made = {"weights": _stamp(job.weights.path), "settings": _settings(job)}
    with written(job.output, rounds.origin(job), job.dtype, made, restart=job.restart) as writer:
        writer.keep(rounds.number, rounds.size)
        yield writer


class Rounds:
    """The samples in rounds: each rank runs some micro batches forward, and rank 0 gathers the results.

    Micro batch i has the `size` samples from i `size` on, in one process and in many: so each sample is computed in the
    same tensors. What exceeds `number` samples is dropped.
    """

    def __init__(self, run: "Run", model: "Model", job: Job) -> None:
        self.run, self.source, self.stepper = run, feed(run, model, job.split), cast("Any", forward_stepper(run, model))
        if not hasattr(self.stepper, "outputs"):
            raise UsageError(
                f"a strategy of the layout '{run.config.parallel.layout}' has a stepper that returns losses "
                f"alone; use another --parallel"
            )
        self.loader: Loader = self.source.loader
        self.number = _number(run, job, self.loader)
        self.size, self.shards = run.micro_batch_size, run.mesh.batch_shard(run.rank)[1]
        stages = len(model.stages.units)
        self.most = 1 if stages == 1 else AHEAD * stages
        self.kind = job.dtype

    def origin(self, job: Job) -> Origin:
        """What the file is made from."""
        trainer = self.run.config.trainer
        tokenizer = fingerprint(self.run.hooks.call.build_tokenizer(run=self.run))
        size = int(getattr(self.run.config.model, "vocab_size", self.loader.vocab_size))
        return Origin(job.k, size, tokenizer, self.loader.fingerprint, job.split, trainer.seed, trainer.seq_length)

    def skip(self, digests: Sequence[int]) -> None:
        """Read past the first samples. UsageError if they have other digests than before."""
        if not digests:
            return
        for batch in self.loader.take(len(digests)):
            tokens, labels = (batch[name].cpu().numpy() for name in ("tokens", "labels"))
            for row, number in enumerate(batch["sample_ids"].tolist()):
                if digest(tokens[row], labels[row]) != digests[number]:
                    raise UsageError(
                        f"sample {number + 1} of the data has changed since the interrupted command has written it; "
                        f"use --restart to begin anew"
                    )

    def results(self, done: int) -> Iterator[list[Sample]]:
        """The samples of each round after the first `done` ones, in their order; on other ranks than 0, none."""
        while done < self.number:
            each = min(self.most, -(-(self.number - done) // (self.size * self.shards)))
            number = each * self.size * self.shards
            found = sorted(self._gathered(self._own(number)), key=lambda sample: sample.number)
            if self.run.rank == 0 and [one.number for one in found] != [*range(done, done + number)]:
                (label,) = self.run.hooks.implementers("build_loader")
                raise UsageError(f"{label} does not number its samples in their order, so the file would mix them up")
            yield found[: self.number - done]
            done += number

    def _own(self, number: int) -> list[Sample]:
        """The results of this rank's part of the next samples; none if another rank counts the same ones."""
        batches: list[RankBatch] = []

        def passing() -> Iterator["RankBatch"]:
            for batch in self.source.take(number):
                batches.append(batch)
                yield batch

        outputs = self.stepper.outputs(passing())
        if not outputs or not self.run.counts_losses:
            return []
        pairs = zip(batches, outputs, strict=True)
        return [sample for batch, output in pairs for sample in self._samples(batch, output)]

    def _samples(self, batch: "RankBatch", output: Any) -> Iterator[Sample]:
        tokens, labels = (batch[name].cpu().numpy() for name in ("tokens", "labels"))
        top, logs = output[TOP_TOKENS].int().cpu().numpy(), output[TOP_TAUGHT].cpu().numpy()
        for row, number in enumerate(batch["sample_ids"].tolist()):
            targets = labels[row] != IGNORED
            found = logs[row, targets].astype(self.kind)
            yield Sample(number, digest(tokens[row], labels[row]), top[row, targets], found)

    def _gathered(self, own: list[Sample]) -> list[Sample]:
        """The samples of all ranks, on rank 0."""
        if self.run.groups is None:
            return own
        group = self.run.groups.beside("teach")
        parts: list[Any] | None = [None] * self.run.mesh.world_size if self.run.rank == 0 else None
        dist.gather_object(own, parts, group=group)
        return [sample for part in parts or () for sample in part]


def _shared(run: "Run", value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return run.gathered(value)[0]


def _number(run: "Run", job: Job, loader: object) -> int:
    if isinstance(job.samples, int):
        return job.samples
    number: int | None = getattr(loader, "samples_per_epoch", None)
    if number is None:
        (label,) = run.hooks.implementers("build_loader")
        raise UsageError(f"{label} does not state how many samples it has; use --samples with a number")
    return number


def _stamp(path: Path) -> str:
    """A digest of names, sizes and times of the files of the weights."""
    files = sorted(one for one in path.rglob("*") if one.is_file())
    found = [(str(one.relative_to(path)), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return sha256(repr(found).encode()).hexdigest()


def _settings(job: Job) -> str:
    """A digest of the settings of the run, but for those that do not matter to the file."""
    merged = merge(job.base, job.overrides)
    related = {key: one.value for key, one in merged.items() if not any(key[: len(no)] == no for no in UNRELATED)}
    return sha256(repr(sorted(related.items(), key=lambda pair: pair[0])).encode()).hexdigest()
