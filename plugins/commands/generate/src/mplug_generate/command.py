"""mplug generate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import Finite, UserPath
from mplug_sampling.saved_model import (
    ModelOptions,
    checkpoint_of,
    end_tokens,
    graphs_option,
    model_options,
    refuse_scores,
)

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings, World
    from mplug_generate.pictures import Encoded
    from mplug_generate.prompts import Prompt
    from mplug_generate.work import Job, Wanted


@click.command()
@click.option("--prompt", help="Text to continue; default: 'def ', or an empty text with --image or --video.")
@model_options("Sample from", adapt=False)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=UserPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="Picture before the text of --prompt, for a model that sees; may be repeated.",
)
@click.option(
    "--video",
    "videos",
    multiple=True,
    type=UserPath(exists=True, file_okay=False),
    metavar="FOLDER",
    help="Video before the text of --prompt: a folder with its frames as pictures, in the order of the numbers in "
    "their names; may be repeated.",
)
@click.option("--fps", type=Finite(0, min_open=True), help="With --video: frames of the folders in a second.")
@click.option(
    "--prompts",
    type=UserPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="File of prompts: one per line, or JSON lines with the field 'prompt' if its name ends in '.jsonl'. Images "
    "and videos of JSON lines are files in the folder of this file.",
)
@click.option(
    "--output",
    type=UserPath(dir_okay=False),
    metavar="FILE",
    help="With --prompts: file for the texts, as JSON lines in the order of the prompts; default: standard output.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(1, 2**40),
    metavar="N",
    help="With --prompts: let texts share pages of a cache with room for N tokens; default: room for the longest text "
    "in each of --batch-size lanes.",
)
@click.option(
    "--batch-size",
    default=8,
    show_default=True,
    type=click.IntRange(1, 2**20),
    help="With --prompts: prompts that are computed together. It does not change their texts.",
)
@click.option(
    "--tokens", default=300, show_default=True, type=click.IntRange(1, 10**9), help="Number of tokens to add."
)
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=Finite(0),
    help="Sampling temperature; 0: always the most probable token.",
)
@click.option(
    "--top-k",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31),
    help="Sample from the k most probable tokens; 0: from all.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=Finite(0, 1, min_open=True),
    help="Sample from the most probable tokens that together have this probability.",
)
@click.option("--stop", "stops", multiple=True, metavar="WORD", help="End the text before this word; may be repeated.")
@click.option("--seed", default=0, show_default=True, type=int, help="The same seed gives the same text.")
@graphs_option
@click.option(
    "--compile",
    default="never",
    show_default=True,
    type=click.Choice(["auto", "never"]),
    help="auto: on a GPU, compile the step of a token: a later first token, and faster ones.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="The prompt is a user's message, in the chat template of the published folder, or of the run's data.",
)
def command(**options: Any) -> None:
    """Sample text from a trained run, or from a published checkpoint.

    With --pretrained, the folder's own tokenizer encodes the prompt, and the text ends at the end token that the
    folder states.

    A cache holds the keys and values of earlier positions, if all modules of the model declare that they serve one;
    otherwise every token computes the whole text again. A text that is longer than the run's trainer.seq_length (or
    than the published model supports) continues from its last tokens, without a cache.

    With --prompts, each line of the output has the fields of its prompt, and 'completion', 'num_tokens' and 'ended'
    ('end': an end token, 'stop': a word of --stop, 'length': --tokens). A text depends on the seed, on its prompt, and
    on how often the same prompt came before; not on other prompts or on --batch-size.

    A run that was trained on conversations ends its texts where its chat template ends an answer. Without --name, the
    command samples from the newest run that has a checkpoint.

    With --chat, each --image and --video becomes what the folder's chat template writes for it. A text with images or
    videos cannot be longer than the longest sequence of the model.

    \b
    mplug generate --prompt "class Parser" --tokens 500 --temperature 0.7
    mplug generate --name chat --chat --prompt "Why is the sky blue?"
    mplug generate --pretrained Qwen3-8B --chat --prompt "Why is the sky blue?" --precision bf16
    mplug generate --pretrained Qwen3-8B --prompts questions.jsonl --output answers.jsonl --parallel tp2
    mplug generate --pretrained Qwen3-VL-8B --chat --image cat.jpg --prompt "What is this?" --precision bf16
    """
    from mplug.commands import launched
    from mplug_generate.work import start

    asked, world = Asked(**options), launched()
    asked.refuse_contradictions()
    job, run = _published(asked, world) if asked.pretrained is not None else _of_run(asked, world)
    if asked.output is not None and (world is None or world.rank == 0):
        _refuse_unwritable(asked.output)
    start(job, run, world)


@dataclass(frozen=True, kw_only=True)
class Asked(ModelOptions):
    """The options of the command line."""

    prompt: str | None
    images: tuple[Path, ...]
    videos: tuple[Path, ...]
    fps: float | None
    prompts: Path | None
    output: Path | None
    batch_size: int
    cache_tokens: int | None
    tokens: int
    temperature: float
    top_k: int
    top_p: float
    stops: tuple[str, ...]
    seed: int
    graphs: str
    compile: str
    chat: bool

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other, or that are no texts."""
        from mplug import UsageError
        from mplug_generate.prompts import is_text

        super().refuse_contradictions()
        if self.prompts is not None and self.prompt is not None:
            raise UsageError("--prompt is one prompt, and --prompts a file of them; use one of them")
        for option, given in (("image", self.images), ("video", self.videos)):
            if self.prompts is not None and given:
                raise UsageError(f"--{option} belongs to --prompt; name the {option}s of --prompts in its JSON lines")
        if (self.fps is None) == bool(self.videos):
            raise UsageError("--video and --fps belong together; add the missing one, or remove the other one")
        if self.prompts is None and self.output is not None:
            raise UsageError("--output is the file for the texts of --prompts; add --prompts, or redirect the output")
        if self.prompts is None and self.cache_tokens is not None:
            raise UsageError(
                "--cache-tokens is the room that the texts of --prompts share; add --prompts, or remove it"
            )
        if self.prompts is not None and self.output is not None and _is_same(self.prompts, self.output):
            raise UsageError(f"--prompts and --output both name '{self.output}'; write to another file")
        if "" in self.stops:
            raise UsageError("--stop is empty; give a word that ends the text")
        for option, text in (("--prompt", self.prompt or ""), *(("--stop", stop) for stop in self.stops)):
            if not is_text(text):
                raise UsageError(f"{option} has bytes that are no characters in UTF-8; give a text")

    def read(self) -> "list[Prompt]":
        """The prompts, before they are encoded."""
        from mplug_generate.prompts import Shown, given_prompt, read_prompts, video_of

        if self.prompts is not None:
            return read_prompts(self.prompts, chat=self.chat)
        media = [*map(Shown.image, self.images), *(video_of(folder, self.fps or 0) for folder in self.videos)]
        default = "" if media else "def "
        return [given_prompt(default if self.prompt is None else self.prompt, media, chat=self.chat)]

    def sampling_settings(self) -> "Settings":
        """The settings of a run that samples: it evaluates nothing, and decides itself what replays or tunes a step."""
        own = (f"trainer.compile={self.compile}", "trainer.tune_kernels=false", "trainer.eval_every=0")
        return self.settings("generate", *own)

    def wanted(
        self, prompts: "Sequence[Prompt]", encoded: "Sequence[Encoded]", context: int, vocab_size: int | None
    ) -> "Wanted":
        """What to sample, with the defaults of a run; UsageError if a prompt has no token, or media and no room."""
        from mplug import UsageError
        from mplug_generate.work import Wanted
        from mplug_sampling.sampling import Sampling

        have_media = any(prompt.media for prompt in prompts)
        for prompt, one in zip(prompts, encoded, strict=True):
            if not one.tokens:
                raise UsageError(f"{prompt.where} is empty; give at least one character to continue")
            if have_media and len(one.tokens) + self.tokens > context:
                raise UsageError(
                    f"{prompt.where} has {len(one.tokens)} tokens, --tokens adds {self.tokens}, and texts with images "
                    f"may have {context}, because a longer text loses its beginning; use fewer tokens, or smaller "
                    f"images"
                )
        return Wanted(
            prompts=tuple(prompts),
            encoded=tuple(encoded),
            num_tokens=self.tokens,
            context=context,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.seed, vocab_size),
            ends=frozenset(),
            stops=self.stops,
            batch_size=self.batch_size,
            cache_tokens=self.cache_tokens,
            graphs=self.graphs == "auto",
            echo=self.prompts is None and not self.chat,
            lines=self.prompts is not None,
            output=self.output,
        )


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _refuse_unwritable(output: Path) -> None:
    """Raise UsageError, before a long computation, if a file cannot be written. What it holds stays until a batch ends.

    A refusal of the run, or a failure before its first texts, then loses no earlier texts.
    """
    from mplug import UsageError

    is_new = not output.exists()
    try:
        output.open("a").close()
        if is_new:
            output.unlink()
    except OSError as error:
        raise UsageError(f"cannot write --output '{output}': {error.strerror}; use another file") from None


def _of_run(asked: Asked, world: "World | None") -> "tuple[Job, Run]":
    from mplug import UsageError
    from mplug.commands import saved_settings
    from mplug_generate.pretrained import encode
    from mplug_generate.work import Job
    from mplug_pretrained import settle_forward
    from mplug_saving import at_step

    prompts = asked.read()
    directory = asked.directory(world)
    at_step(directory / "checkpoints", asked.step)  # refuses a step that is absent
    base = saved_settings(directory)
    run, overrides = settle_forward(base, asked.sampling_settings(), world, 1)
    refuse_scores(run, directory)
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    if tokenizer is None:
        raise UsageError(
            f"the data plugin of run '{directory}' has no tokenizer to decode tokens; use another run with --name"
        )
    if asked.chat and not hasattr(tokenizer, "encode_chat"):
        raise UsageError(
            f"--chat: the data of run '{directory}' have no chat template, because it was not trained on "
            f"conversations; write the whole prompt in --prompt, without --chat"
        )

    def tokens(prompt: "Prompt") -> "Sequence[int]":
        return encode(tokenizer, prompt, chat=True) if asked.chat else tokenizer.encode(prompt.text)

    # A template marks the places of pictures itself, as that of a folder does.
    encoded = _encoded(prompts, lambda: run, tokens, tokenizer.encode, of_folder=asked.chat)
    size = getattr(tokenizer, "vocab_size", None)
    wanted = asked.wanted(prompts, encoded, run.config.trainer.seq_length, size)
    wanted = replace(wanted, ends=frozenset(getattr(tokenizer, "end_tokens", ())))
    return Job(base, overrides, checkpoint_of(run, directory, asked.step), wanted), run


def _published(asked: Asked, world: "World | None") -> "tuple[Job, Run]":
    from mplug.commands import Registry
    from mplug_generate.pretrained import encode, settings_of
    from mplug_generate.work import Job
    from mplug_pretrained import SavedModel, settle_forward
    from mplug_tokenization import folder_tokenizer

    assert asked.pretrained is not None
    weights, prompts = SavedModel.published(asked.pretrained), asked.read()
    folder, here = weights.path, asked.sampling_settings()
    tokenizer = folder_tokenizer(Registry(), folder)

    def of_any_length() -> "Run":
        base, settings, _ = settings_of(folder, [("a prompt", 1)], 1, here)
        return settle_forward(base, settings, world, 1)[0]

    encoded = _encoded(
        prompts,
        of_any_length,
        lambda prompt: encode(tokenizer, prompt, chat=asked.chat),
        tokenizer.encode_part,
        of_folder=True,
    )
    lengths = [(prompt.where, len(one.tokens)) for prompt, one in zip(prompts, encoded, strict=True)]
    base, settings, context = settings_of(folder, lengths, asked.tokens, here)
    wanted = asked.wanted(prompts, encoded, context, None)
    run, overrides = settle_forward(base, settings, world, 1)
    return Job(base, overrides, weights, replace(wanted, ends=end_tokens(folder))), run


def _encoded(
    prompts: "Sequence[Prompt]",
    run: "Callable[[], Run]",
    encode: "Callable[[Prompt], Sequence[int]]",
    encode_part: "Callable[[str], list[int]]",
    *,
    of_folder: bool,
) -> "list[Encoded]":
    """The tokens of prompts, with those of their images by the model of the run, which has any length.

    Every process reads the images twice: here for their sizes, so that errors come before the weights are read, and
    later batch by batch, because those of all prompts may not fit into memory.
    """
    from mplug_generate.pictures import Encoded, encoded

    if not any(prompt.media for prompt in prompts):
        return [Encoded.of_text(encode(prompt)) for prompt in prompts]
    from mplug_sampling.sampler import processor_of

    processor = processor_of(run())
    return [encoded(prompt, encode(prompt), processor, encode_part, of_folder=of_folder) for prompt in prompts]
