"""mplug lm-eval."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import Finite
from mplug_sampling.saved_model import ModelOptions, model_options, refuse_scores

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import World
    from mplug_lm_eval.work import Job

LONGEST = 1 << 20
"""The longest sequence of a published model whose folder states none, or more."""
UNKNOWN = 2048
"""The length for a published model whose family does not know its longest sequence, as in the harness."""


@click.command()
@click.option("--tasks", "tasks", multiple=True, required=True, metavar="A,B", help="Tasks; '*' matches any letters.")
@click.option(
    "--include-path",
    "include_paths",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Folder with tasks of your own (YAML files); may be repeated.",
)
@click.option("--num-fewshot", type=click.IntRange(0), metavar="N", help="Examples in a context; default: the task's.")
@click.option("--limit", type=Finite(0, min_open=True), metavar="N", help="Only the first N documents of a task.")
@click.option(
    "--bootstrap-iters",
    default=1000,
    show_default=True,
    type=click.IntRange(0, 10**9),
    metavar="N",
    help="Resamples for the standard errors of metrics that are no means; 0: none of these errors.",
)
@click.option("--gen-kwargs", default="", metavar="A=B,...", help="Options of generation: max_gen_toks=64.")
@model_options("Evaluate")
@click.option(
    "--max-length",
    type=click.IntRange(2, 2**31),
    metavar="N",
    help="Most tokens that the model reads; default: trainer.seq_length of the run, or what the model supports.",
)
@click.option(
    "--batch-size",
    default=8,
    show_default=True,
    type=click.IntRange(1, 2**20),
    help="Texts that are computed together. It does not change the results.",
)
@click.option("--seed", default=1234, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Seed of examples.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File for the JSON.")
@click.option("--log-samples", is_flag=True, help="With --output: also write every document with its answers.")
def command(**options: Any) -> None:
    """Run tasks of lm-evaluation-harness on a run, or on a published checkpoint.

    The harness chooses documents, writes prompts and computes scores; the model answers in the processes of mplug, so
    no copy of its weights is written. --output has the harness's own JSON. 'lm-eval ls tasks' lists its tasks.

    \b
    mplug lm-eval --tasks hellaswag,arc_easy --limit 100 --name first
    mplug lm-eval --tasks gsm8k --num-fewshot 5 --pretrained Qwen3-8B --precision bf16 --parallel tp2
    mplug lm-eval --tasks my_task --include-path tasks --pretrained DIR --output results.json
    """
    from mplug.commands import launched
    from mplug_lm_eval.harness import as_json, find_tasks, table_of
    from mplug_lm_eval.work import prepared, work
    from mplug_pretrained import run_forward

    asked, world = Asked(**options), launched()
    asked.refuse_contradictions()
    is_first = world is None or world.rank == 0
    job, run = asked.job(world)
    prepared(job)  # refuses settings before any process starts
    if is_first:
        find_tasks(job.wanted.tasks, job.wanted.include_paths)
    results = run_forward(run, world, work, job)
    if is_first:
        _report(table_of(results), as_json(results), asked.output)


def _report(table: str, text: str, output: Path | None) -> None:
    from mplug import RunError, write_whole

    click.echo(table)
    if output is not None:
        try:
            write_whole(output, text)
        except OSError as error:
            raise RunError(f"cannot write --output '{output}': {error.strerror}") from None


@dataclass(frozen=True, kw_only=True)
class Asked(ModelOptions):
    """The options of the command line."""

    tasks: tuple[str, ...]
    include_paths: tuple[Path, ...]
    num_fewshot: int | None
    limit: float | None
    bootstrap_iters: int
    gen_kwargs: str
    max_length: int | None
    batch_size: int
    seed: int
    output: Path | None
    log_samples: bool

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other, and if the harness is not installed."""
        from importlib.util import find_spec

        from mplug import UsageError

        super().refuse_contradictions()
        if self.log_samples and self.output is None:
            raise UsageError("--log-samples writes into the file of --output; add --output")
        if self.output is not None and not self.output.parent.is_dir():
            raise UsageError(f"cannot write --output '{self.output}': its folder does not exist; make it")
        if "" in self._tasks():
            raise UsageError("--tasks has an empty name; separate names by a comma")
        if find_spec("lm_eval") is None:
            raise UsageError("lm-evaluation-harness is not installed: pip install lm_eval")

    def _tasks(self) -> tuple[str, ...]:
        return tuple(name.strip() for word in self.tasks for name in word.split(","))

    def job(self, world: "World | None") -> "tuple[Job, Run]":
        """What each process does, and the prepared run."""
        from mplug_lm_eval.wanted import Wanted
        from mplug_lm_eval.work import Job

        wanted = Wanted(
            *(self._tasks(), self.include_paths, self.num_fewshot, self.limit, self.gen_kwargs, self.batch_size),
            *(self.max_length, self.seed, self.log_samples, self.bootstrap_iters),
        )
        found = self.chosen(
            self.settings("lm-eval", "trainer.eval_every=0"), world, 1, self.max_length or LONGEST, UNKNOWN
        )
        refuse_scores(found.run, found.directory)
        return Job(found.base, found.overrides, found.weights, wanted), found.run
