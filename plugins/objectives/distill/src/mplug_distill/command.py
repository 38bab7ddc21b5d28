"""mplug teach."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import PluginName
from mplug_sampling.saved_model import ModelOptions, model_options

if TYPE_CHECKING:
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
def command(**options: Any) -> None:
    """Write a teacher's largest probabilities of the targets of training data.

    The teacher runs forward over the first samples of a loader, in the order in which a run takes them. The file has
    the K most probable tokens of each target, and the log-probabilities of these and of all others together. Train on
    it with --objective distill --data taught; the data, their order (trainer.seed) and trainer.seq_length must be
    those of this command.

    \b
    mplug teach --name teacher --samples 3200 --output teacher.safetensors
    mplug teach --pretrained TEACHER --data packed --set data.path=chats.jsonl --seq-length 1024 --output t.safetensors
    """
    from mplug import RunError, UsageError
    from mplug.commands import launched
    from mplug_distill.writing import prepared, teach

    asked = Asked(**options)
    asked.refuse_contradictions()
    if launched() is not None:
        raise UsageError("'mplug teach' runs the teacher in one process; start it without a launcher")
    if not asked.output.parent.is_dir():
        raise UsageError(f"cannot write --output '{asked.output}': its folder does not exist; make it")
    job = asked.job()
    prepared(job)
    try:
        samples, targets = teach(job)
    except OSError as error:
        raise RunError(f"cannot write --output '{asked.output}': {error.strerror}") from None
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

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other."""
        from mplug import UsageError

        super().refuse_contradictions()
        if self.pretrained is not None and self.data is None:
            raise UsageError("--pretrained has no data of its own; name a loader by --data, and its settings")

    def job(self) -> "Job":
        """What is written."""
        from mplug_distill.writing import Job

        given = {"trainer.seq_length": self.seq_length, "data.name": self.data}
        own = [f"{field}={value}" for field, value in given.items() if value is not None]
        found = self.chosen(self.settings("teach", *own), None, self.batch_size, LONGEST)
        number = self.samples or "all"
        model = (found.base, found.overrides, found.weights)
        return Job(*model, self.split, number, k=self.top, dtype=self.dtype, output=self.output)
