"""The tokens of texts, by the tokenizer of a run or of a published folder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError

if TYPE_CHECKING:
    from mplug import Run


@dataclass(frozen=True)
class Tokens:
    """How texts become tokens and back.

    `alone` are the tokens of a text without special tokens around it, `prompt` those with them. `prefix` is the token
    in front of a text that has no context; texts that begin with `prefix_text` have it already. `ends` end a text, and
    so does the text `end_text`; it is empty if it is unknown.
    """

    alone: Callable[[str], list[int]]
    prompt: Callable[[str], list[int]]
    decode: Callable[[Iterable[int]], str]
    prefix: int
    prefix_text: str
    ends: frozenset[int]
    end_text: str

    @staticmethod
    def of_run(run: "Run") -> "Tokens":
        """By the tokenizer of a run's data: the token that ends a document also stands in front of one."""
        tokenizer: Any = run.hooks.call.build_tokenizer(run=run)
        end = getattr(tokenizer, "eod", None)
        if tokenizer is None or end is None:
            lacks = "has no tokenizer" if tokenizer is None else "has a tokenizer without an end of a document"
            (label,) = run.hooks.implementers("build_loader")
            raise UsageError(
                f"{label} {lacks}, which the tasks need; export the run (mplug checkpoint export), and evaluate the "
                f"folder with --pretrained"
            )
        return Tokens(tokenizer.encode, tokenizer.encode, tokenizer.decode, end, "", frozenset({end}), "")

    @staticmethod
    def of_folder(folder: Path) -> "Tokens":
        """By the tokenizer of a published folder; UsageError if it names no token in front of texts or behind them."""
        from mplug.commands import Registry
        from mplug_sampling.saved_model import end_tokens
        from mplug_tokenization import folder_tokenizer

        tokenizer = folder_tokenizer(Registry(), folder)
        first = tokenizer.begin or tokenizer.end
        if first is None:
            raise UsageError(
                f"'{folder}' names no token that begins or ends a text, and the first token of a text needs one in "
                f"front; name it there (bos_token or eos_token of tokenizer_config.json)"
            )
        end, text = tokenizer.end or (None, "")
        ends = end_tokens(folder) | (frozenset() if end is None else frozenset({end}))
        return Tokens(tokenizer.encode, tokenizer.encode_prompt, tokenizer.decode, *first, ends, text)
