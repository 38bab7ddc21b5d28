"""SentencePiece tokenizers, unigram or byte-pair encoding, loaded from a model file."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class ModelTokenizer:
    """A SentencePiece model. Its normalization may change spaces and characters of a text."""

    def __init__(self, processor: "SentencePieceProcessor", eod: int | None) -> None:
        self.processor, self.eod = processor, eod
        control = filter(processor.is_control, range(processor.get_piece_size()))
        self.special_tokens: dict[str, int] = {processor.id_to_piece(number): number for number in control}
        self.vocab_size: int = processor.get_piece_size()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self.processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        ids: list[list[int]] = self.processor.encode(list(texts), num_threads=1)
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        text: str = self.processor.decode(list(tokens))
        return text


class SentencePiece:
    """A SentencePiece model, from its file."""

    files = ("path",)

    class Config(BaseModel):
        """The file, and the SentencePiece piece that ends a document."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="the file of the model, *.model")
        eod: str | None = Field(None, description="the piece that ends a document; null: the model's own eos")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> ModelTokenizer:
        """Read the file; raise UsageError if it is not a SentencePiece model or lacks the `eod` piece."""
        from sentencepiece import SentencePieceProcessor

        try:
            processor = SentencePieceProcessor(model_file=self.config.path)
        except (RuntimeError, OSError) as error:
            raise UsageError(
                f"tokenizers/sentencepiece: '{self.config.path}' is no SentencePiece model: {error}; name the file "
                f"*.model that a model comes with"
            ) from None
        return ModelTokenizer(processor, self._eod(processor))

    def _eod(self, processor: Any) -> int | None:
        wanted = self.config.eod
        if wanted is None:
            found: int = processor.eos_id()
            return found if found >= 0 else None
        found = processor.piece_to_id(wanted)
        if processor.id_to_piece(found) != wanted:
            raise UsageError(f"tokenizers/sentencepiece: '{self.config.path}' has no piece '{wanted}' to be its eod")
        return found
