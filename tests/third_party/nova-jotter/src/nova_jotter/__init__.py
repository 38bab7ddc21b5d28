"""JSON lines: a document a line, packed into windows of byte tokens."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import Loader, MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run
    from nova_jotter.corpus import Corpus

END = 0xFF
"""The token that ends a document: a byte that UTF-8 never has."""
VOCAB_SIZE = 256


class Tokens:
    """A token is a byte: of UTF-8, or the end of a document."""

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of bytes; ends of documents are dropped, and what is not UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token != END).decode(errors="replace")


class Jotter:
    """Windows of packed documents, every one once an epoch, in a seeded order."""

    class Config(BaseModel):
        """Which documents, and how they are shuffled."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="a file of JSON lines: an object a line")
        field: str = Field("text", description="the field that holds a document's text")
        validation_percent: int = Field(
            10, ge=1, le=50, description="share of the documents for validation, by a hash of their text"
        )
        shuffle_buffer: int | None = Field(
            None, ge=2, description="the next windows of which a sample is drawn; null: a permutation of the epoch"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self) -> None:
        """The file must be there."""
        if not Path(self.config.path).is_file():
            raise UsageError(f"data.path '{self.config.path}' is not a file; name a file of JSON lines")

    @cached_property
    def corpus(self) -> "Corpus":
        """The packed documents of both splits, read once."""
        from nova_jotter.corpus import pack

        return pack(Path(self.config.path), self.config.field, self.config.validation_percent)

    @hookimpl
    def build_tokenizer(self) -> Tokens:
        """Bytes need no file."""
        return Tokens()

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> Loader:
        """Windows of a split in the order that the config asks for."""
        from nova_jotter.buffer import BufferedLoader
        from nova_jotter.windows import Permutations, Windows

        trainer, capacity = run.config.trainer, self.config.shuffle_buffer
        try:
            windows = Windows(self.corpus.tokens(split), trainer.seq_length)
        except ValueError as error:
            raise UsageError(f"data.path '{self.config.path}': the {split} split {error}") from None
        shard, size = run.mesh.batch_shard(run.rank), run.micro_batch_size
        if capacity is not None:
            return BufferedLoader(windows, capacity, seed=trainer.seed, shard=shard, micro_batch_size=size)
        order = Permutations(windows.count, trainer.seed)
        return MapLoader(
            lambda sample_ids: windows.read(sample_ids, [order.window(number) for number in sample_ids]),
            vocab_size=VOCAB_SIZE,
            shard=shard,
            micro_batch_size=size,
            samples_per_epoch=windows.count,
        )
