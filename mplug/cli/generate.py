"""mplug generate."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.cli.options import Finite, PluginName, RunName

if TYPE_CHECKING:
    from mplug.contracts import Tokenizer
    from mplug.model.model import Model
    from mplug.model.sampling import Sampling
    from mplug.run.run import Run


@click.command()
@click.option("--name", type=RunName(), help="Name of the run; default: the newest run.")
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; default: the newest valid one.")
@click.option("--prompt", default="def ", show_default=True, help="Text to continue.")
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
    "--top-k", default=0, type=click.IntRange(0, 2**31), help="Sample from the k most probable tokens; 0: from all."
)
@click.option(
    "--top-p",
    default=1.0,
    type=Finite(0, 1, min_open=True),
    help="Sample from the most probable tokens that together have this probability.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="The same seed gives the same text.")
@click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]), help="Device to compute on.")
@click.option(
    "--pretrained",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Sample from a published checkpoint (a folder with a config.json) instead of a run.",
)
@click.option(
    "--chat", is_flag=True, help="With --pretrained: the prompt is a user's message, in the folder's chat template."
)
@click.option("--precision", type=PluginName("precisions"), help="With --pretrained: number formats; default: fp32.")
@click.option("--attention", type=PluginName("kernels"), help="With --pretrained: kernel plugin for attention.")
def command(
    name: str | None,
    step: int | None,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str,
    pretrained: Path | None,
    chat: bool,
    precision: str | None,
    attention: str | None,
) -> None:
    """Sample text from a trained run, or from a published checkpoint.

    With --pretrained, the folder's own tokenizer encodes the prompt, and the text ends at the end token of its
    generation_config.json.

    \b
    mplug generate --prompt "class Parser" --tokens 500 --temperature 0.7
    mplug generate --pretrained Qwen3-8B --chat --prompt "Why is the sky blue?" --precision bf16
    """
    from mplug.checkpoint.folder import at_step
    from mplug.config.defaults import saved_settings
    from mplug.config.sources import read_assignments
    from mplug.errors import UsageError
    from mplug.model.sampling import Sampling
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.folder import find_directory
    from mplug.run.prepare import prepare

    if pretrained is not None:
        from mplug.cli.generate_pretrained import Request, generate

        if name is not None or step is not None:
            raise UsageError("--pretrained names a folder, and --name and --step a run; use one of them")
        draws = (temperature, top_k, top_p, seed)
        generate(Request(pretrained, prompt, chat, tokens, *draws, device, precision or "fp32", attention))
        return
    if chat or precision is not None or attention is not None:
        raise UsageError("--chat, --precision and --attention apply only to published checkpoints; add --pretrained")
    directory = find_directory(name)
    checkpoint = at_step(directory / "checkpoints", step)
    own = (f"trainer.device={device}", "parallel.layout=", "trainer.graphs=false")  # graphs replay training steps
    here = read_assignments(own, "generate")
    run = prepare(resolve(Registry(), saved_settings(directory), here))
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    if tokenizer is None:
        raise UsageError(
            f"the data plugin of run '{directory}' has no tokenizer to decode tokens; use another run with --name"
        )
    encoded = tokenizer.encode(prompt)
    if not encoded:
        raise UsageError("--prompt is empty; give at least one character to continue")
    sampling = Sampling(temperature, top_k, top_p, seed, getattr(tokenizer, "vocab_size", None))
    model = _loaded(run, checkpoint) if step is not None else _loaded_from_newest_valid(run, checkpoint)
    _print(run, model, tokenizer, encoded, tokens, sampling)


def _loaded(run: "Run", checkpoint: "Path") -> "Model":
    from mplug.checkpoint.states import load_for_inference

    return load_for_inference(run, checkpoint)


def _loaded_from_newest_valid(run: "Run", newest: "Path") -> "Model":
    """The model of the newest valid checkpoint; report those that are skipped, as `mplug train --resume` does."""
    from mplug.checkpoint.choice import choose
    from mplug.checkpoint.states import load_for_inference
    from mplug.checkpoint.verified import Verified

    verified = Verified()
    choice = choose(run, newest, verified)
    for line in choice.lines("sampling from"):
        click.echo(f"mplug: {line}", err=True)
    return load_for_inference(run, choice.path, verified)


def _print(
    run: "Run", model: "Model", tokenizer: "Tokenizer", encoded: list[int], count: int, sampling: "Sampling"
) -> None:
    from mplug.model.sampling import sample

    tokens, written = list(encoded), tokenizer.decode(encoded)
    click.echo(written, nl=False)
    for token in sample(model, encoded, count, run.config.trainer.seq_length, sampling):
        tokens.append(token)
        text = tokenizer.decode(tokens).rstrip("\ufffd")  # the last bytes of a character may be in the next token
        click.echo(text[len(written) :], nl=False)
        written = max(written, text, key=len)
    click.echo(tokenizer.decode(tokens)[len(written) :])
