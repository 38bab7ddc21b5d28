"""Fine-tuning on pairs of texts: the encoder reads one, the decoder learns to write the other."""

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from mplug import ENCODER_TEXTS, MAY_MOVE, MapLoader, UsageError, hookimpl
from mplug_pairs.reading import Count, Encoder, Pair, find_files, read_pairs
from mplug_tokenization import CorpusTokenizer, TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mplug import Run, RunConfig

log = logging.getLogger("mplug.pairs")
Split = Literal["train", "validation"]


class Pairs:
    """Pairs of texts from JSON lines with 'input' and 'target'; each is a sample."""

    class Config(BaseModel):
        """The pairs, and how they become samples."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str, MAY_MOVE] = Field(
            min_length=1, description="a file of JSON lines, a folder of files *.jsonl, or a glob"
        )
        validation_path: Annotated[str | None, MAY_MOVE] = Field(
            None,
            min_length=1,
            description="pairs for validation, given like `path`; null: validation_percent of `path`",
        )
        validation_percent: Annotated[float, MAY_MOVE] = Field(
            5, gt=0, le=50, description="percentage of the pairs for validation, by a hash of their texts"
        )
        tokenizer: str = Field(
            "bytes",
            description="name of an installed tokenizer plugin; a run that begins with a published folder uses its "
            "tokenizer",
        )
        tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
        encoder_length: int = Field(
            512, ge=2, lt=1 << 20, description="tokens of 'input' with its end; the decoder has trainer.seq_length"
        )
        too_long: Literal["truncate", "drop"] = Field(
            "truncate", description="for pairs with a text that is longer than a sample: truncate or drop them"
        )
        end_token: NonNegativeInt | None = Field(
            None, description="the token behind both texts; null: the tokenizer's end of a document"
        )
        start_token: NonNegativeInt = Field(
            0, description="the decoder's first token, and its padding; 0 is the padding of T5's tokenizer"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    def folder_settings(folder: "Path", tokenizer: str, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG004  # the host passes it
        """The tokenizer of the published checkpoint with which a run begins."""
        return {"tokenizer": tokenizer, "tokenizer_options": options}

    @cached_property
    def record(self) -> TokenizerRecord:
        """The tokenizer that the config names."""
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def tokenizer(self) -> CorpusTokenizer:
        """The tokenizer, built once."""
        return load_tokenizer(self.record)

    @hookimpl
    def configure(self) -> None:
        """Refuse a wrong tokenizer."""
        assert self.record.vocab_size

    @hookimpl
    def check_data(self, config: "RunConfig") -> None:
        """Refuse missing files, and files whose first line is no pair."""
        own = self.config
        given = [(own.path, "data.path")]
        if own.validation_path is not None and config.trainer.eval_every:
            given.append((own.validation_path, "data.validation_path"))
        for path, field in given:
            if next(read_pairs(find_files(path, field)), None) is None:
                raise UsageError(f"{field} '{path}' has no pair; set it to files with pairs")

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The texts of the encoder."""
        return ENCODER_TEXTS

    @hookimpl
    def build_tokenizer(self) -> CorpusTokenizer:
        """Return the tokenizer."""
        return self.tokenizer

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> MapLoader:
        """Read and encode the split's pairs in memory."""
        from mplug_pairs.samples import Samples

        own, trainer, count = self.config, run.config.trainer, Count()
        end, length = self._end(), trainer.seq_length
        encoder = Encoder(self.tokenizer.encode, end, own.encoder_length, length, own.too_long == "drop")
        pairs = list(encoder.of(self._of_split(split), count))
        if not pairs:
            remedy = ", set data.validation_path, or set trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(
                f"data.path '{own.path}': no pair of the {split} split can be used: of {count.pairs}, {count.dropped} "
                f"are too long; use other pairs{remedy}"
            )
        if run.rank == 0:
            log.info("%s: %d pairs, %d truncated, %d dropped", split, len(pairs), count.truncated, count.dropped)
        samples = Samples(pairs, trainer.seed, own.encoder_length, length, own.start_token)
        return MapLoader(
            samples.read,
            vocab_size=max(self.tokenizer.vocab_size, end + 1, own.start_token + 1),
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=samples.count,
            fingerprint=samples.fingerprint,
        )

    def _of_split(self, split: Split) -> "Iterator[Pair]":
        own = self.config
        if own.validation_path is not None:
            name = "data.validation_path" if split == "validation" else "data.path"
            return read_pairs(find_files(own.validation_path if split == "validation" else own.path, name))
        found = read_pairs(find_files(own.path, "data.path"))
        return (pair for pair in found if pair.held_out(own.validation_percent) == (split == "validation"))

    def _end(self) -> int:
        end = self.tokenizer.eod if self.config.end_token is None else self.config.end_token
        if end is None:
            raise UsageError(
                f"the tokenizer '{self.config.tokenizer}' has no end of a document; set data.end_token to the number "
                f"of the token that ends a text"
            )
        return end
