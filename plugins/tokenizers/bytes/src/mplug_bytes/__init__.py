"""The byte tokenizer: a token is a byte of UTF-8, and token 256 ends a document."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mplug import hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = 256


class ByteTokenizer:
    """A tokenizer of 257 tokens that needs no file and no training."""

    vocab_size = END + 1
    eod: int | None = END

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[NDArray[Any]]":
        """The bytes of each text, as arrays."""
        import numpy as np  # keeps the import of this module fast

        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of bytes, without ends of documents; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token != END).decode(errors="replace")


class Bytes:
    """Each byte of UTF-8 is a token, and one more token ends a document."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> ByteTokenizer:
        """Return the byte tokenizer."""
        return ByteTokenizer()
