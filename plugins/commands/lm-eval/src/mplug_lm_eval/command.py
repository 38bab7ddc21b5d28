"""mplug lm-eval."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import Finite, PluginName, RunName, StoredPath

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings, World
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
@click.option("--name", type=RunName(), help="Name of the run; default: the newest run.")
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; default: the newest valid one.")
@click.option(
    "--pretrained",
    type=StoredPath(),
    metavar="FOLDER",
    help="Evaluate a published checkpoint (a folder of an installed format, or its address) instead of a run.",
)
@click.option(
    "--adapt",
    type=PluginName("adapters"),
    multiple=True,
    help="With --pretrained: the plugin of trained adapters, whose folder a setting names (--set adapters.NAME.path).",
)
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
@click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]), help="Device to compute on.")
@click.option("--attention", type=PluginName("kernels"), help="Kernel plugin for attention; default: the run's.")
@click.option("--parallel", metavar="LAYOUT", help="Layout of strategies that divide the computation: tp2, ep4, pp2.")
@click.option("--precision", type=PluginName("precisions"), help="Number formats; default: the run's, or fp32.")
@click.option("--set", "assignments", metavar="FIELD=VALUE", multiple=True, help="Set a field: kernels.default=triton.")
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
class Asked:
    """The options of the command line."""

    tasks: tuple[str, ...]
    include_paths: tuple[Path, ...]
    num_fewshot: int | None
    limit: float | None
    bootstrap_iters: int
    gen_kwargs: str
    name: str | None
    step: int | None
    pretrained: Path | None
    adapt: tuple[str, ...]
    max_length: int | None
    batch_size: int
    seed: int
    output: Path | None
    log_samples: bool
    device: str
    attention: str | None
    parallel: str | None
    precision: str | None
    assignments: tuple[str, ...]

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other, and if the harness is not installed."""
        from importlib.util import find_spec

        from mplug import UsageError

        if self.pretrained is not None and (self.name is not None or self.step is not None):
            raise UsageError("--pretrained names a folder, and --name and --step a run; use one of them")
        if self.adapt and self.pretrained is None:
            raise UsageError("--adapt applies to --pretrained; a run has its own adapters")
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
        from mplug.commands import default_settings, find_directory, saved_settings
        from mplug_lm_eval.wanted import Wanted
        from mplug_lm_eval.work import Job
        from mplug_pretrained import SavedModel, folder_length, settle_forward

        wanted = Wanted(
            *(self._tasks(), self.include_paths, self.num_fewshot, self.limit, self.gen_kwargs, self.batch_size),
            *(self.max_length, self.seed, self.log_samples, self.bootstrap_iters),
        )
        if self.pretrained is None:
            directory = find_directory(self.name)
            base = saved_settings(directory)
            run, overrides = settle_forward(base, self._settings(), world, 1)
            weights, lines = SavedModel.of_run(run, directory, self.step)
            for line in lines:
                click.echo(f"mplug: {line}", err=True)
            return Job(base, overrides, weights, wanted), run
        weights, base = SavedModel.published(self.pretrained), default_settings()
        own = [f"checkpoint.pretrained.path={self.pretrained}"]
        own += [] if self.precision else ["trainer.precision=fp32"]
        settings = folder_length(self.pretrained, base, self._settings(*own), self.max_length or LONGEST, UNKNOWN)
        run, overrides = settle_forward(base, settings, world, 1)
        return Job(base, overrides, weights, wanted), run

    def _settings(self, *own: str) -> "Settings":
        from mplug.commands import assignment_hint, merge, read_assignments

        assignment_hint(self.assignments)
        layout = f"parallel.layout={self.parallel or ''}"
        fixed = [f"trainer.device={self.device}", "trainer.graphs=false", "trainer.eval_every=0", layout, *own]
        given = {"kernels.attention": self.attention, "trainer.precision": self.precision}
        fixed += [f"{field}={value}" for field, value in given.items() if value is not None]
        fixed += [f"adapters.{name}={{}}" for name in self.adapt]
        return merge(read_assignments(fixed, "lm-eval"), read_assignments(self.assignments))
