"""mplug generate --pretrained: the prompts and the run of a published checkpoint, by the folder's own tokenizer."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_generate.prompts import Prompt

if TYPE_CHECKING:
    from mplug.commands import Settings
    from mplug_tokenization import FolderTokenizer


def encode(tokenizer: "FolderTokenizer", prompt: Prompt, *, chat: bool) -> list[int]:
    """The tokens of a prompt; with `chat`, of a conversation that ends with it."""
    if not chat:
        return tokenizer.encode_prompt(prompt.text)
    return tokenizer.encode_chat(prompt.messages or [{"role": "user", "content": prompt.text}])


def settings_of(
    folder: Path, prompts: Sequence[tuple[str, int]], num_tokens: int, here: "Settings"
) -> "tuple[Settings, Settings, int]":
    """(base, overrides, context): the settings of a run of the folder's model, and the tokens that the model sees.

    `prompts` are the names of prompts in errors, and their lengths. Raises UsageError if a prompt is longer than the
    model supports.
    """
    from mplug.commands import Registry, default_settings, merge, read_assignments, resolve
    from mplug_pretrained import longest_sequence

    registry = Registry()
    first = read_assignments(["trainer.seq_length=1"], "generate")
    base, settings = default_settings(), merge(first, here)
    config = resolve(registry, base, settings)
    longest = longest_sequence(config, folder)
    for name, length in prompts:
        if longest is not None and length > longest:
            raise UsageError(f"{name} has {length} tokens, and the model supports {longest}; shorten it")
    most = max(length for _, length in prompts) + num_tokens
    context = min(most, longest or most)
    degrees = prod(config.parallel.degrees.values())
    whole = -(-context // degrees) * degrees  # a layout may have to divide the sequence
    if longest is not None and whole > longest:
        whole = max(longest // degrees, 1) * degrees
    return base, merge(settings, read_assignments([f"trainer.seq_length={whole}"], "generate")), context
