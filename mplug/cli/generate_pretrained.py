"""mplug generate --pretrained: text from a published checkpoint, by the folder's own tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.errors import UsageError, listed

if TYPE_CHECKING:
    from mplug.contracts import FolderTokenizer
    from mplug.model.model import Model
    from mplug.run.run import Run


@dataclass(frozen=True)
class Request:
    """What to generate from a folder. With `chat`, the prompt is the message of a user."""

    folder: Path
    prompt: str
    chat: bool
    num_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    device: str
    precision: str
    attention: str | None


def generate(request: Request) -> None:
    """Print the prompt and its continuation; with `chat`, the answer alone. The text ends at an end token."""
    from mplug.config.public import is_public
    from mplug.registry.entry_points import Registry
    from mplug.registry.public import folder_tokenizer

    if not is_public(request.folder):
        raise UsageError(
            f"--pretrained '{request.folder}' has no config.json of a published checkpoint; use its folder"
        )
    tokenizer = folder_tokenizer(Registry(), request.folder)
    message = {"role": "user", "content": request.prompt}
    encoded = tokenizer.encode_chat([message]) if request.chat else tokenizer.encode_prompt(request.prompt)
    if not encoded:
        raise UsageError("--prompt is empty; give at least one character to continue")
    run, context = _run(request, len(encoded))
    model = _model(run, request.folder)
    _print(model, tokenizer, encoded, _tokens(request, run, model, encoded, context), echo=not request.chat)


def _run(request: Request, length: int) -> "tuple[Run, int]":
    """The run of the folder's model, and the number of tokens that the model sees."""
    from mplug.config.defaults import default_settings
    from mplug.config.sources import merge, read_assignments
    from mplug.registry.entry_points import Registry
    from mplug.registry.public import longest_sequence
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare

    registry = Registry()
    own = [f"trainer.device={request.device}", f"trainer.precision={request.precision}", "trainer.seq_length=1"]
    own += [f"kernels.attention={request.attention}"] if request.attention is not None else []
    here = read_assignments(own, "generate")
    folder = read_assignments([f"checkpoint.pretrained.path={request.folder}"], "--pretrained")
    base, settings = default_settings(), merge(here, folder)
    config = resolve(registry, base, settings)
    longest = longest_sequence(config, request.folder)
    context = length + request.num_tokens
    if longest is not None:
        if length > longest:
            raise UsageError(f"--prompt has {length} tokens, and the model supports {longest}; shorten it")
        context = min(context, longest)
    settings = merge(settings, read_assignments([f"trainer.seq_length={context}"], "generate"))
    return prepare(resolve(registry, base, settings)), context


def _model(run: "Run", folder: Path) -> "Model":
    from mplug.checkpoint.public_load import load_public_for_inference, refuse_other_model
    from mplug.model.build import allocate_parts, build_model

    model = build_model(run)
    refuse_other_model(folder, model, run.config.checkpoint.pretrained)  # before memory is allocated
    allocate_parts(run, model)
    load_public_for_inference(run, model, folder)
    return model


def _tokens(request: Request, run: "Run", model: "Model", encoded: list[int], context: int) -> Iterator[int]:
    """The tokens up to the first end token, or as many as requested."""
    from mplug.model.sampling import Sampling, sample

    ends = end_tokens(request.folder)
    sampling = Sampling(request.temperature, request.top_k, request.top_p, request.seed, None)
    for token in sample(model, encoded, request.num_tokens, context, sampling):
        if token in ends:
            return
        yield token


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text: those of generation_config.json, else those of config.json."""
    from mplug.config.public import CONFIG, read_json

    files = [folder / "generation_config.json", folder / CONFIG]
    for fields in (read_json(file) for file in files if file.is_file()):
        found: Any = fields.get("eos_token_id")
        if found is not None:
            ends = found if isinstance(found, list) else [found]
            if not all(type(end) is int for end in ends):
                raise UsageError(f"'{folder}' has the end tokens {listed(map(repr, ends))}; they must be integers")
            return set(ends)
    return set()


def _print(model: "Model", tokenizer: "FolderTokenizer", encoded: list[int], new: Iterator[int], *, echo: bool) -> None:
    tokens = list(encoded)
    written = tokenizer.decode(tokens)
    if echo:
        click.echo(written, nl=False)
    for token in new:
        tokens.append(token)
        text = tokenizer.decode(tokens).rstrip("\ufffd")  # the last bytes of a character may be in the next token
        click.echo(text[len(written) :], nl=False)
        written = max(written, text, key=len)
    click.echo(tokenizer.decode(tokens)[len(written) :])
