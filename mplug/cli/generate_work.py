"""The work of `mplug generate` in each of its processes: load the weights, sample, print or write the texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.cli.generate_prompts import Prompt, Text, occurrences, output_line
from mplug.errors import RunError, listed

if TYPE_CHECKING:
    from mplug.checkpoint.verified import Verified
    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.model.decoding import Alone
    from mplug.model.model import Model
    from mplug.model.sampling import Sampling
    from mplug.model.token_steps import Replays
    from mplug.run.run import Run


@dataclass(frozen=True)
class Wanted:
    """What to sample: the prompts with their tokens, and when texts end.

    `echo`: print the prompt before its text. `output`: the file for the texts, one JSON object per line; with `lines`
    and no file, these lines are printed. Otherwise there is one prompt, whose text is printed as it is sampled.
    """

    prompts: tuple[Prompt, ...]
    encoded: tuple[tuple[int, ...], ...]
    num_tokens: int
    context: int
    sampling: "Sampling"
    ends: frozenset[int]
    stops: tuple[str, ...]
    batch_size: int
    graphs: bool
    echo: bool
    lines: bool
    output: Path | None

    def batches(self) -> list[slice]:
        """The prompts that are sampled together, in their order."""
        count = len(self.prompts)
        return [slice(begin, min(begin + self.batch_size, count)) for begin in range(0, count, self.batch_size)]

    @property
    def differ(self) -> bool:
        """Whether prompts of a batch have different lengths."""
        return any(len({len(tokens) for tokens in self.encoded[batch]}) > 1 for batch in self.batches())


@dataclass(frozen=True)
class Job:
    """The description of the work that each process receives: plain data that can be pickled.

    `weights` is a checkpoint of a run, or the folder of a published one (`published`).
    """

    base: "Settings"
    overrides: "Settings"
    weights: Path
    published: bool
    wanted: Wanted
    verified: "Verified | None" = None


def start(job: Job, run: "Run", world: "World | None") -> None:
    """Refuse what cannot be sampled, then do the work in this process or in those of the layout, started here."""
    from mplug.distributed.launch import Stopped, launch
    from mplug.model.decoding import Ranks, refuse_undivided

    if world is not None or run.mesh.world_size == 1:
        work(job)
        return
    tried = _prepared(job)
    model = _built(tried, job)  # refuses before any process starts
    refuse_undivided(model, Ranks(tried, model))
    try:
        launch(run.mesh.world_size, work, job)
    except Stopped as stop:
        raise SystemExit(128 + stop.signal) from None


def work(job: Job, send: Callable[..., None] | None = None) -> None:
    """Sample as one process; the first one prints and writes."""
    from mplug.distributed.world import launched
    from mplug.model.compilation import compiled_step
    from mplug.model.decoding import Ranks, refuse_undivided
    from mplug.model.token_steps import replays_for
    from mplug.training.job import among

    world = launched()
    run = _prepared(job)
    with among(world, run):
        model = _loaded(run, job)
        ranks = Ranks(run, model)
        refuse_undivided(model, ranks)
        if run.rank == 0:
            for message in model.replaced:
                click.echo(f"mplug: {message}", err=True)
        compiled, reason = compiled_step(run, model)
        if run.rank == 0 and reason:
            click.echo(f"mplug: the step of a token is not compiled, because {reason}", err=True)
        replays, reasons = replays_for(run, model, compiled)
        if run.rank == 0 and reasons and run.device.startswith("cuda"):
            click.echo(f"mplug: no CUDA graph replays the step of a token, because {listed(reasons)}", err=True)
        _sample(run, model, job, ranks, replays)


def _prepared(job: Job) -> "Run":
    """The run, which samples instead of training."""
    from mplug.model.build import choose_device
    from mplug.model.caching import multiple_of_positions
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare
    from mplug.run.run import Decoding

    run = prepare(resolve(Registry(), job.base, job.overrides))
    run.device = choose_device(run.config)
    padded = job.wanted.differ or multiple_of_positions(run.mesh) > 1
    run.decoding = Decoding(padded=padded, graphs=job.wanted.graphs)
    return run


def _built(run: "Run", job: Job) -> "Model":
    """The model on the meta device; UsageError if the weights are those of another one."""
    from mplug.checkpoint.public_load import refuse_other_model
    from mplug.model.build import build_model

    model = build_model(run)
    if job.published:
        refuse_other_model(job.weights, model, run.config.checkpoint.pretrained)
    return model


def _loaded(run: "Run", job: Job) -> "Model":
    from mplug.checkpoint.public_load import load_public_for_inference
    from mplug.checkpoint.states import load_for_inference
    from mplug.model.build import allocate_parts

    if not job.published:
        return load_for_inference(run, job.weights, job.verified)
    model = _built(run, job)
    allocate_parts(run, model)
    load_public_for_inference(run, model, job.weights)
    return model


def tokenizer_of(run: "Run", published: Path | None) -> Any:
    """The tokenizer of a run's data (None if it has none), or that of a published folder."""
    from mplug.registry.entry_points import Registry
    from mplug.registry.public import folder_tokenizer

    return folder_tokenizer(Registry(), published) if published else run.hooks.call.build_tokenizer(run=run)


def _sample(run: "Run", model: "Model", job: Job, ranks: "Alone", replays: "Replays") -> None:
    from mplug.model.decoding import sample
    from mplug.model.sampling import sample_key

    wanted = job.wanted
    tokenizer = tokenizer_of(run, job.weights if job.published else None)
    keys = [sample_key(wanted.sampling.seed, number) for number in occurrences(wanted.encoded)]
    for batch in wanted.batches():
        encoded = wanted.encoded[batch]
        texts = [Text(tokenizer, tokens, wanted.ends, wanted.stops) for tokens in encoded]
        show = _Terminal(texts[0], run.rank == 0 and not wanted.lines)
        if wanted.echo:
            show.print(tokenizer.decode(encoded[0]))

        def take(number: int, token: int, texts: Sequence[Text] = texts, show: _Terminal = show) -> bool:
            has_ended = texts[number].take(token)
            show.update()
            return has_ended

        sample(model, encoded, keys[batch], wanted.num_tokens, wanted.context, wanted.sampling, take, ranks, replays)
        for text in texts:
            text.finish()
        show.finish()
        if run.rank == 0 and wanted.lines:
            lines = [output_line(*one) for one in zip(wanted.prompts[batch], texts, strict=True)]
            _write(wanted.output, lines, is_first=batch.start == 0)


class _Terminal:
    """Prints a text as it grows."""

    def __init__(self, text: Text, is_on: bool) -> None:
        self.text, self.is_on = text, is_on

    def print(self, words: str) -> None:
        """Print without the end of a line; the terminal shows it at once."""
        if self.is_on and words:
            click.echo(words, nl=False)

    def update(self) -> None:
        """Print what is certain."""
        self.print(self.text.shown())

    def finish(self) -> None:
        """Print the rest, and end the line."""
        if self.is_on:
            click.echo(self.text.shown(is_last=True))


def _write(output: Path | None, lines: Sequence[str], *, is_first: bool) -> None:
    """Print lines, or write them to a file; the first ones replace what the file holds."""
    if output is None:
        for line in lines:
            click.echo(line)
        return
    try:
        with output.open("w" if is_first else "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise RunError(f"cannot write --output '{output}': {error.strerror}") from None
