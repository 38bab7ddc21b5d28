"""Bytes: a token is a byte of UTF-8; 256 ends a document."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mplug import hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = 256


class ByteTokenizer:
    """257 tokens, no file, no training."""

    vocab_size = END + 1
    eod: int | None = END

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[NDArray[Any]]":
        """The bytes of each text, as arrays."""
        import numpy as np  # the plugin's module stays quick to import

        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of bytes: ends of documents are left out, and what is not UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token != END).decode(errors="replace")


class Bytes:
    """A token is a byte of UTF-8, and one more ends a document."""

    class Config(BaseModel):
        """Nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> ByteTokenizer:
        """Bytes need no file."""
        return ByteTokenizer()
