"""Tables: every cell of a column is a document, and documents are packed into windows of bytes."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run

END = 0xFF
"""The token that ends a document: a byte that UTF-8 never has."""
VOCAB_SIZE = 256
HELD_OUT = 10
"""Every n-th row is for validation."""


class Table:
    """Windows of packed cells, every one once an epoch, in a seeded order."""

    class Config(BaseModel):
        """Which cells."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str, MAY_MOVE] = Field(description="a table whose first line names its columns")
        column: str = Field("text", description="the column that holds the documents")
        delimiter: str = Field(",", min_length=1, max_length=1, description="the character between two cells")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def check_data(self) -> None:
        """The file must be there."""
        if not Path(self.config.path).is_file():
            raise UsageError(f"data.path '{self.config.path}' is not a file; name a table")

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> MapLoader:
        """Windows of a split."""
        from nova_table.cells import cells
        from nova_table.windows import Windows

        config, trainer = self.config, run.config.trainer
        rows = enumerate(cells(Path(config.path), config.column, config.delimiter))
        held_out = split == "validation"
        kept = (text for number, text in rows if (number % HELD_OUT == 0) == held_out)
        stream = b"".join(text.encode() + bytes([END]) for text in kept)
        return MapLoader(
            Windows(stream, trainer.seq_length, trainer.seed).read,
            vocab_size=VOCAB_SIZE,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=max(0, len(stream) - 1) // trainer.seq_length,
            fingerprint=hashlib.sha256(stream).hexdigest(),
        )
