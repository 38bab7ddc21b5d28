"""Byte-level text from a file, a folder or a glob, or from the Python standard library's source."""

import logging
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Run, RunConfig

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
    """Windows of a stream of bytes, in a seeded order that differs in every epoch. A short text is repeated."""

    class Config(BaseModel):
        """The text, and the share of it for validation."""

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

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> Bytes:
        """Return the byte tokenizer."""
        return Bytes()

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse missing and unreadable files and splits without text; report a split that is repeated."""
        from mplug_text.corpus import enough_for_windows, find_files, measure_split

        trainer, percent = config.trainer, self.config.validation_percent
        root, files = find_files(self.config.path, self.config.pattern)
        sentences = [_not_text(files)]
        for split in ("train", "validation") if trainer.eval_every else ("train",):
            size = measure_split(root, files, split, percent)
            if not size:
                raise self._without_text(split)
            if not enough_for_windows(size, trainer.seq_length):
                sentences.append(
                    f"{self._where}: the {split} split has {size} bytes, and trainer.seq_length={trainer.seq_length} "
                    f"needs {2 * trainer.seq_length + 1}; samples are cut from its repetitions"
                )
        return [sentence for sentence in sentences if sentence]

    @property
    def _where(self) -> str:
        return f"data.path '{self.config.path}'" if self.config.path else "Python's standard library"

    def _without_text(self, split: str) -> UsageError:
        remedy = ", or set trainer.eval_every=0" if split == "validation" else ""
        return UsageError(f"{self._where}: the {split} split has no text; set data.path to more text{remedy}")

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> MapLoader:
        """Read the split's files into memory."""
        from mplug_text.corpus import enough_for_windows, find_files, fingerprint_of, read_split
        from mplug_text.windows import RepeatedWindows, Windows

        trainer = run.config.trainer
        root, files = find_files(self.config.path, self.config.pattern)
        if split == "train" and run.rank == 0 and (sentence := _not_text(files)):
            log.warning("%s", sentence)
        stream = read_split(root, files, split, self.config.validation_percent)
        if not len(stream):
            raise self._without_text(split)
        kind = Windows if enough_for_windows(len(stream), trainer.seq_length) else RepeatedWindows
        windows = kind(stream, trainer.seq_length, trainer.seed)
        return MapLoader(
            windows.read,
            vocab_size=Bytes.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=windows.count,
            fingerprint=fingerprint_of(stream),
        )


def _not_text(files: "list[Path]") -> str:
    """The warning about files that contain documents in a format that this plugin does not parse, or ''."""
    found = sorted({file.suffix for file in files} & NO_TEXT)
    if not found:
        return ""
    return (
        f"data/text reads every byte of a file as text, including {', '.join(found)} files; if they contain documents, "
        f"convert them with 'mplug data preprocess' and train with --data indexed"
    )
