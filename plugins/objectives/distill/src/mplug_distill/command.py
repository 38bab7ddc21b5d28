"""mplug teach."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import PluginName
from mplug_sampling.saved_model import ModelOptions, model_options, refuse_scores

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import World
    from mplug_distill.writing import Job

LONGEST = 2048
"""The default length of sequences with --pretrained, unless the model supports less."""


@click.command()
@model_options("Teach with")
@click.option("--data", type=PluginName("data"), help="Data loader to take samples from; default: the run's.")
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", show_default=True, help="Split.")
@click.option(
    "--samples", type=click.IntRange(1), metavar="N", help="Number of the first samples; default: those of one epoch."
)
@click.option(
    "--seq-length",
    type=click.IntRange(1, 2**31),
    metavar="N",
    help=f"Tokens of a sequence; default: the run's. With --pretrained: what the model supports, at most {LONGEST}.",
)
@click.option(
    "--batch-size", type=click.IntRange(1, 2**20), metavar="N", help="Sequences of a forward pass; default: the run's."
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="K",
    help="Tokens of a target that are kept.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "float32", "float64"]),
    default="float32",
    show_default=True,
    help="Number format of the log-probabilities in the file.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help="File to write."
)
@click.option(
    "--restart", is_flag=True, help="Begin anew, instead of continuing the file that an interrupted command has left."
)
def command(**options: Any) -> None:
    """Write a teacher's largest probabilities of the targets of training data.

    The teacher runs forward over the first samples of a loader, in the order in which a run takes them. The file has
    the K most probable tokens of each target, and the log-probabilities of these and of all others together. Train on
    it with --objective distill --data taught; the data, their order (trainer.seed) and trainer.seq_length must be
    those of this command.

    A layout may divide the samples (dp2, fsdp4) and the teacher (tp2, pp2): the file is the same. A command that was
    interrupted continues if it is given again.

    \b
    mplug teach --name teacher --samples 3200 --output teacher.safetensors
    mplug teach --pretrained TEACHER --data packed --set data.path=chats.jsonl --seq-length 1024 --output t.safetensors
    mplug teach --pretrained TEACHER --parallel tp4dp2 --precision bf16 --data text --output t.safetensors
    """
    from mplug.commands import launched
    from mplug_distill.top_writer import is_left
    from mplug_distill.writing import prepared, teach
    from mplug_pretrained import run_forward

    asked, world = Asked(**options), launched()
    asked.refuse_contradictions()
    is_first = world is None or world.rank == 0
    job, run = asked.job(world)
    prepared(job)  # refuses before any process starts
    try:
        samples, targets = run_forward(run, world, teach, job)
    except (KeyboardInterrupt, SystemExit):
        if is_first and is_left(asked.output):
            kept = f"the samples so far are kept beside '{asked.output}'"
            click.echo(f"{kept}; give the same command to continue", err=True)
        raise
    if is_first:
        size = asked.output.stat().st_size
        click.echo(f"{samples:,} samples with {targets:,} targets, {size / 1e6:,.1f} MB: {asked.output}")


@dataclass(frozen=True, kw_only=True)
class Asked(ModelOptions):
    """The options of the command line."""

    data: str | None
    split: str
    samples: int | None
    seq_length: int | None
    batch_size: int | None
    top: int
    dtype: str
    output: Path
    restart: bool

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other."""
        from mplug import UsageError

        super().refuse_contradictions()
        if self.pretrained is not None and self.data is None:
            raise UsageError("--pretrained has no data of its own; name a loader by --data, and its settings")
        if not self.output.parent.is_dir():
            raise UsageError(f"cannot write --output '{self.output}': its folder does not exist; make it")

    def job(self, world: "World | None") -> "tuple[Job, Run]":
        """What each process does, and the prepared run."""
        from mplug_distill.writing import Job

        given = {"trainer.seq_length": self.seq_length, "data.name": self.data}
        own = [f"{field}={value}" for field, value in given.items() if value is not None]
        found = self.chosen(self.settings("teach", *own), world, self.batch_size, LONGEST)
        refuse_scores(found.run, found.directory)
        number = self.samples or "all"
        model = (found.base, found.overrides, found.weights)
        job = Job(*model, self.split, number, self.top, self.dtype, self.output, self.restart)
        return job, found.run
