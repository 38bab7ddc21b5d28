"""The work of `mplug generate` in each of its processes: load the weights, sample, print or write the texts.

The command imports this module before it has checked its options, so functions import torch themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import RunError, UsageError, counted
from mplug.commands import listed
from mplug_generate.pictures import Encode, Encoded, prepared
from mplug_generate.prompts import Prompt, occurrences, output_line
from mplug_sampling.text import Text

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings, World
    from mplug_pretrained import SavedModel
    from mplug_sampling.decoding import Alone
    from mplug_sampling.sampler import Sampler
    from mplug_sampling.sampling import Sampling
    from mplug_sampling.streams import EncoderTexts, Media
    from mplug_sampling.token_steps import Replays
    from mplug_streams import Medium

MOST = 1024
"""With more tokens than these, a cache with room for all of them is often much too large."""


@dataclass(frozen=True)
class Wanted:
    """What to sample: the prompts with their tokens, and when texts end.

    `echo`: print the prompt before its text. `output`: the file for the texts, one JSON object per line; with `lines`
    and no file, these lines are printed. Otherwise there is one prompt, whose text is printed as it is sampled.
    """

    prompts: tuple[Prompt, ...]
    encoded: tuple[Encoded, ...]
    num_tokens: int
    context: int
    sampling: "Sampling"
    ends: frozenset[int]
    stops: tuple[str, ...]
    batch_size: int
    cache_tokens: int | None
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
        return any(len({len(one.tokens) for one in self.encoded[batch]}) > 1 for batch in self.batches())

    @property
    def have_media(self) -> bool:
        """Whether a prompt has pictures or videos."""
        return any(prompt.media for prompt in self.prompts)


@dataclass(frozen=True)
class Job:
    """The description of the work that each process receives: plain data that can be pickled."""

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    wanted: Wanted


def start(job: Job, run: "Run", world: "World | None") -> None:
    """Refuse what cannot be sampled, then do the work in this process or in those of the layout, started here."""
    from mplug_pretrained import run_forward
    from mplug_sampling.decoding import Ranks, refuse_undivided

    if world is None and run.mesh.world_size > 1:
        tried, sampler = _prepared(job)
        job.weights.build(tried)  # refuses before any process starts
        refuse_undivided(sampler, Ranks(tried, sampler))
    run_forward(run, world, work, job)


def work(job: Job, send: Callable[..., None] | None = None) -> None:
    """Sample as one process; the first one prints and writes."""
    from mplug.commands import allocate_parts, among, launched
    from mplug_sampling.decoding import Ranks, refuse_undivided
    from mplug_sampling.fast_steps import compiled_step
    from mplug_sampling.token_steps import replays_for

    world = launched()
    run, sampler = _prepared(job)
    with among(world, run):
        job.weights.load(run, allocate_parts)
        ranks = Ranks(run, sampler)
        refuse_undivided(sampler, ranks)
        if run.rank == 0:
            for message in sampler.replaced:
                click.echo(f"mplug: {message}", err=True)
        compiled, reason = compiled_step(run, sampler)
        if run.rank == 0 and reason:
            click.echo(f"mplug: the step of a token is not compiled, because {reason}", err=True)
        replays, reasons = replays_for(run, sampler, compiled)
        if run.rank == 0 and reasons and run.device.startswith("cuda"):
            click.echo(f"mplug: no CUDA graph replays the step of a token, because {listed(reasons)}", err=True)
        _sample(run, sampler, job, ranks, replays)


def _prepared(job: Job) -> "tuple[Run, Sampler]":
    """The run, which samples instead of training, and what will sample when its model is built."""
    from mplug.commands import Registry, choose_device, resolve
    from mplug_sampling.sampler import Sampler, sampling_run

    sampler = Sampler(padded=job.wanted.differ, graphs=job.wanted.graphs, media=job.wanted.have_media)
    run = sampling_run(resolve(Registry(), job.base, job.overrides), sampler)
    run.device = choose_device(run.config)
    return run, sampler


def tokenizer_of(run: "Run", published: Path | None) -> Any:
    """The tokenizer of a run's data (None if it has none), or that of a published folder."""
    from mplug.commands import Registry
    from mplug_tokenization import folder_tokenizer

    return folder_tokenizer(Registry(), published) if published else run.hooks.call.build_tokenizer(run=run)


def _sample(run: "Run", sampler: "Sampler", job: Job, ranks: "Alone", replays: "Replays") -> None:
    from mplug_sampling.sampling import sample_key

    wanted, sampling = job.wanted, job.wanted.sampling
    published = job.weights.is_published
    tokenizer = tokenizer_of(run, job.weights.path if published else None)
    encode: Encode = tokenizer.encode_part if published else tokenizer.encode
    answering = sampler.model.plan.answering
    if answering is not None:
        wanted = _answered(wanted, tokenizer, published=published)
    prompts = [(one.tokens, prompt.media) for one, prompt in zip(wanted.encoded, wanted.prompts, strict=True)]
    keys = [sample_key(sampling.seed, number) for number in occurrences(prompts)]
    reason = _reason_against_lanes(sampler, wanted, ranks)
    if reason and wanted.cache_tokens is not None:
        raise UsageError(f"--cache-tokens is for texts that begin at any step, and {reason}; remove it")
    if reason or not wanted.lines:
        _in_batches(run, sampler, wanted, tokenizer, encode, keys, ranks, replays)
    else:
        _in_lanes(run, sampler, wanted, tokenizer, keys, ranks, replays)
    if run.rank == 0 and wanted.output is not None:
        click.echo(f"wrote {counted(len(wanted.prompts), 'text')} to '{wanted.output}'")


def _reason_against_lanes(sampler: "Sampler", wanted: Wanted, ranks: "Alone") -> str:
    """Why texts begin and end in batches, as a clause; empty if each begins when another one has ended."""
    if sampler.eager_because:
        return sampler.eager_because
    if ranks.shards > 1:
        return "the layout divides the prompts of a batch"
    if wanted.have_media or sampler.model.plan.answering is not None:
        return "prompts have pictures, or an encoder reads them"
    longest = max(len(one.tokens) for one in wanted.encoded)
    if longest + wanted.num_tokens > wanted.context:
        return (
            f"a prompt of {longest} tokens and --tokens {wanted.num_tokens} are longer than the context of "
            f"{wanted.context} tokens"
        )
    if wanted.cache_tokens is None and wanted.num_tokens > MOST:
        return f"a cache for --tokens {wanted.num_tokens} begins smaller, and grows"
    if wanted.cache_tokens is None and len(wanted.prompts) <= wanted.batch_size:
        return "all prompts are one batch"
    return ""


def _in_lanes(
    run: "Run",
    sampler: "Sampler",
    wanted: Wanted,
    tokenizer: Any,
    keys: Sequence[int],
    ranks: "Alone",
    replays: "Replays",
) -> None:
    """Sample `batch_size` texts at a time; a text that ends makes room for the next. Write them in order."""
    from mplug_sampling import Lanes, LaneText, fill_lanes

    prompts = [one.tokens for one in wanted.encoded]
    texts = [Text(tokenizer, one.text, wanted.ends, wanted.stops) for one in wanted.encoded]
    has_ended, written = [False] * len(texts), 0

    def take(number: int, token: int, _: float) -> bool:
        nonlocal written
        lane_text, text = lane_texts[number], texts[number]
        if not (text.take(token) or len(lane_text.taken) >= wanted.num_tokens):
            return False
        text.finish()
        has_ended[number], first = True, written
        while written < len(texts) and has_ended[written]:
            written += 1
        if run.rank == 0 and written > first:
            of_texts = zip(wanted.prompts[first:written], texts[first:written], strict=True)
            _write(wanted.output, [output_line(*one) for one in of_texts], is_first=first == 0)
        return True

    longest = max(map(len, prompts)) + wanted.num_tokens
    num_lanes = min(wanted.batch_size, len(prompts))
    lanes = Lanes(sampler, num_lanes, longest, ranks, replays, wanted.cache_tokens)
    lane_texts = [LaneText(prompt, key, wanted.sampling) for prompt, key in zip(prompts, keys, strict=True)]
    fill_lanes(lanes, lane_texts, take, wanted.num_tokens)


def _in_batches(
    run: "Run",
    sampler: "Sampler",
    wanted: Wanted,
    tokenizer: Any,
    encode: Encode,
    keys: Sequence[int],
    ranks: "Alone",
    replays: "Replays",
) -> None:
    """Sample batch by batch; a batch ends with its longest text. A text that is printed is printed as it grows."""
    from mplug_sampling.decoding import sample

    sampling, answering = wanted.sampling, sampler.model.plan.answering
    for batch in wanted.batches():
        encoded = wanted.encoded[batch]
        texts = [Text(tokenizer, one.text, wanted.ends, wanted.stops) for one in encoded]
        show = _Terminal(texts[0], run.rank == 0 and not wanted.lines)
        if wanted.echo:
            show.print(tokenizer.decode(encoded[0].text))

        def take(number: int, token: int, texts: Sequence[Text] = texts, show: _Terminal = show) -> bool:
            has_ended = texts[number].take(token)
            show.update()
            return has_ended

        tokens: list[Sequence[int]] = [one.tokens for one in encoded]
        media: Media | EncoderTexts | None = _media_of(run, sampler, wanted.prompts[batch], encode)
        if answering is not None:
            media, tokens = _texts_of(run, sampler, tokens), [(answering.start,)] * len(tokens)
        sample(sampler, tokens, keys[batch], wanted.num_tokens, wanted.context, sampling, take, ranks, replays, media)
        for text in texts:
            text.finish()
        show.finish()
        if run.rank == 0 and wanted.lines:
            lines = [output_line(*one) for one in zip(wanted.prompts[batch], texts, strict=True)]
            _write(wanted.output, lines, is_first=batch.start == 0)


def _answered(wanted: Wanted, tokenizer: Any, *, published: bool) -> Wanted:
    """What to sample from a model with an encoder: its texts end in the token that ends a text of the decoder.

    The answer does not continue the prompt, so it has room of its own. A folder's tokenizer adds the end itself.
    """
    end: int | None = getattr(tokenizer, "eod", None)
    context = max(wanted.context, 1 + wanted.num_tokens)
    if published or end is None:
        encoded = tuple(replace(one, text=()) for one in wanted.encoded)
        return replace(wanted, encoded=encoded, context=context, echo=False)
    encoded = tuple(Encoded((*one.tokens, end), ()) for one in wanted.encoded)
    return replace(wanted, encoded=encoded, context=context, echo=False, ends=wanted.ends | {end})


def _texts_of(run: "Run", sampler: "Sampler", texts: Sequence[Sequence[int]]) -> "EncoderTexts":
    """The texts of a batch for the encoder."""
    from mplug_sampling.streams import EncoderTexts
    from mplug_streams import own_rows

    plan = sampler.model.plan
    return EncoderTexts(plan, texts, lambda entries: own_rows(entries, plan, run.mesh, run.rank))


def _media_of(run: "Run", sampler: "Sampler", prompts: Sequence[Prompt], encode: Encode) -> "Media | None":
    """The pictures and videos of a batch; None if it has none."""
    from mplug_sampling.sampler import processor_of
    from mplug_sampling.streams import Media
    from mplug_streams import own_rows

    if not any(prompt.media for prompt in prompts):
        return None
    processor, plan = processor_of(run), sampler.model.plan

    def prepare(number: int) -> "Sequence[Medium]":
        return prepared(prompts[number], processor, encode)

    return Media(processor, plan, prepare, lambda entries: own_rows(entries, plan, run.mesh, run.rank))


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
