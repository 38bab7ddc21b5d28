"""Byte-level text from a file, a folder or a glob, or from the Python standard library's source."""

import logging
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Run

log = logging.getLogger("mplug.text")

NO_TEXT = {".jsonl", ".parquet", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files whose bytes are not plain text."""


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: "list[int]") -> str:
        """The text of bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class Text:
    """Windows of a stream of bytes, in a seeded order that differs in every epoch."""

    class Config(BaseModel):
        """The text, and the share of it for validation."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str | None, MAY_MOVE] = Field(
            None, min_length=1, description="a file, a folder or a glob; null: Python's standard library"
        )
        pattern: Annotated[str, MAY_MOVE] = Field(
            "**/*", description="glob of the files to read in a folder that `path` names"
        )
        validation_percent: Annotated[int, MAY_MOVE] = Field(
            5, ge=1, le=50, description="share of the files for validation; of every file's end where files are few"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> Bytes:
        """Return the byte tokenizer."""
        return Bytes()

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> MapLoader:
        """Read the split's files into memory."""
        from mplug_text.corpus import find_files, fingerprint_of, read_split
        from mplug_text.windows import Windows

        trainer = run.config.trainer
        root, files = find_files(self.config.path, self.config.pattern)
        if split == "train" and run.rank == 0:
            _warn_of(files)
        stream = read_split(root, files, split, self.config.validation_percent)
        try:
            windows = Windows(stream, trainer.seq_length, trainer.seed)
        except ValueError as error:
            where = f"data.path '{self.config.path}'" if self.config.path else "the standard library"
            raise UsageError(f"{where}: the {split} split {error}") from None
        return MapLoader(
            windows.read,
            vocab_size=Bytes.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=windows.count,
            fingerprint=fingerprint_of(stream),
        )


def _warn_of(files: "list[Path]") -> None:
    """Warn of files that contain documents in a format that this plugin does not parse."""
    found = sorted({file.suffix for file in files} & NO_TEXT)
    if found:
        log.warning(
            "data/text reads every byte of a file as text, of %s too; where documents in it are meant, make a "
            "corpus of them (mplug data preprocess) and train with --data indexed",
            ", ".join(found),
        )
