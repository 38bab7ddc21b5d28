"""Text from a file, a folder or a glob, or from the Python standard library's source.

A token is a byte, or that of a tokenizer plugin.
"""

import json
import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, hookimpl, local_path
from mplug_tokenization import CorpusTokenizer, TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mplug import Run, RunConfig

log = logging.getLogger("mplug.text")

NO_TEXT = {".jsonl", ".parquet", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files whose bytes are not plain text."""


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8. The byte 0 ends a document."""

    vocab_size = 256
    eod: int | None = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: "list[int]") -> str:
        """The text of bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class Text:
    """Windows of a stream of tokens, in a seeded order that differs in every epoch. A short text is repeated."""

    class Config(BaseModel):
        """The text, the share of it for validation, and its tokens."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str | None, MAY_MOVE] = Field(
            None, min_length=1, description="a file, a folder or a glob; null: Python's standard library"
        )
        pattern: Annotated[str, MAY_MOVE] = Field("**/*", description="glob of the files to read if `path` is a folder")
        validation_percent: Annotated[int, MAY_MOVE] = Field(
            5,
            ge=1,
            le=50,
            description="percentage of the files for validation; with fewer than 20 files: of the end of every file",
        )
        tokenizer: str | None = Field(
            None,
            description="name of an installed tokenizer plugin; null: a token is a byte. A run that begins with a "
            "published checkpoint uses the folder's tokenizer",
        )
        tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    def folder_settings(folder: Path, tokenizer: str, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG004  # the host passes it
        """The tokenizer of the published checkpoint with which a run begins."""
        return {"tokenizer": tokenizer, "tokenizer_options": options}

    @hookimpl
    def configure(self) -> None:
        """Refuse a wrong tokenizer, and options without one."""
        if self.config.tokenizer_options and self.config.tokenizer is None:
            raise UsageError("data.tokenizer_options has options, and data.tokenizer is null; set data.tokenizer")
        assert self.record is None or self.record.vocab_size

    @cached_property
    def record(self) -> TokenizerRecord | None:
        """The tokenizer that the config names; None for bytes."""
        if self.config.tokenizer is None:
            return None
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def tokenizer(self) -> Bytes | CorpusTokenizer:
        """The tokenizer, built once."""
        return Bytes() if self.record is None else load_tokenizer(self.record)

    @hookimpl
    def build_tokenizer(self) -> Bytes | CorpusTokenizer:
        """Return the tokenizer."""
        return self.tokenizer

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse missing and unreadable files and splits without text.

        Report a split that is repeated, and bytes for a published model that probably has other tokens.
        """
        from mplug_text.corpus import enough_for_windows, find_files, measure_split, refuse_corpus

        trainer, percent = config.trainer, self.config.validation_percent
        if self.config.path is not None:
            refuse_corpus(self.config.path)
        root, files = find_files(self.config.path, self.config.pattern)
        sentences = [_not_text(files), self._other_tokens(config)]
        for split in ("train", "validation") if trainer.eval_every else ("train",):
            size = measure_split(root, files, split, percent)
            if not size:
                raise self._without_text(split)
            if self.config.tokenizer is None and not enough_for_windows(size, trainer.seq_length):
                sentences.append(self._repeated(split, f"{size} bytes", trainer.seq_length))
        return [sentence for sentence in sentences if sentence]

    def _other_tokens(self, config: "RunConfig") -> str:
        """The warning about a published model whose folder has no tokenizer that decided the tokens, or ''."""
        start = config.checkpoint.pretrained
        if start is None or start.path is None or self.config.tokenizer is not None:
            return ""
        if getattr(config.model, "vocab_size", Bytes.vocab_size) <= Bytes.vocab_size:
            return ""
        if not (local_path(start.path) / "config.json").is_file():
            return ""
        return (
            f"data/text makes a token of each byte, and the model of '{start.path}' has {config.model.vocab_size} "
            f"tokens; name its tokenizer with data.tokenizer and data.tokenizer_options"
        )

    @property
    def _where(self) -> str:
        return f"data.path '{self.config.path}'" if self.config.path else "Python's standard library"

    def _repeated(self, split: str, size: str, seq_length: int) -> str:
        return (
            f"{self._where}: the {split} split has {size}, and trainer.seq_length={seq_length} needs "
            f"{2 * seq_length + 1}; samples are cut from its repetitions"
        )

    def _without_text(self, split: str) -> UsageError:
        remedy = ", or set trainer.eval_every=0" if split == "validation" else ""
        return UsageError(f"{self._where}: the {split} split has no text; set data.path to more text{remedy}")

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> MapLoader:
        """Read the split's files into memory."""
        from mplug_text.corpus import enough_for_windows, find_files, fingerprint_of, read_split
        from mplug_text.tokens import tokens_of
        from mplug_text.windows import RepeatedWindows, Windows

        trainer, tokenizer = run.config.trainer, self.tokenizer
        root, files = find_files(self.config.path, self.config.pattern)
        if split == "train" and run.rank == 0 and (sentence := _not_text(files)):
            log.warning("%s", sentence)
        stream = read_split(root, files, split, self.config.validation_percent)
        tokens = stream if isinstance(tokenizer, Bytes) else tokens_of(stream, tokenizer)
        if not len(tokens):
            raise self._without_text(split)
        if enough_for_windows(len(tokens), trainer.seq_length):
            read, count = (windows := Windows(tokens, trainer.seq_length, trainer.seed)).read, windows.count
        else:
            read, count = RepeatedWindows(tokens, trainer.seq_length, trainer.seed, tokenizer.eod).read, None
            if run.rank == 0 and self.config.tokenizer is not None:  # `check_data` counts bytes only
                log.warning("%s", self._repeated(split, f"{len(tokens)} tokens", trainer.seq_length))
        return MapLoader(
            read,
            vocab_size=tokenizer.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=count,
            fingerprint=fingerprint_of(tokens),
        )


LONGEST_LINE = 1 << 20
"""Bytes of a first line that are read to see whether it is a conversation."""


def _has_messages(file: Path) -> bool:
    """Whether the first line of a file is the JSON of a conversation."""
    try:
        with file.open("rb") as opened:
            line = json.loads(opened.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(line, dict) and not {"messages", "conversations"}.isdisjoint(line)


def _not_text(files: list[Path]) -> str:
    """The warning about files that contain documents in a format that this plugin does not parse, or ''."""
    found = sorted({file.suffix for file in files} & NO_TEXT)
    if not found:
        return ""
    chats = next((file for file in files if file.suffix == ".jsonl" and _has_messages(file)), None)
    if chats is not None:
        return (
            f"the lines of '{chats}' are conversations, and data/text reads them as plain text, with their braces and "
            f"quotes; to train on the messages, add --data packed (docs/packed.md)"
        )
    return (
        f"data/text reads every byte of a file as text, including {', '.join(found)} files; if they contain documents, "
        f"convert them with 'mplug data preprocess' and train with --data indexed"
    )
