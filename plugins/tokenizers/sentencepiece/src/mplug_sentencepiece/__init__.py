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

        path: str = Field(description="the SentencePiece model file, *.model")
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
                f"tokenizers/sentencepiece: path '{self.config.path}' is no SentencePiece model: {error}; set path to "
                f"a model's file *.model"
            ) from None
        return ModelTokenizer(processor, self._eod(processor))

    def _eod(self, processor: Any) -> int | None:
        piece = self.config.eod
        if piece is None:
            number: int = processor.eos_id()
            return number if number >= 0 else None
        number = processor.piece_to_id(piece)
        if processor.id_to_piece(number) != piece:
            raise UsageError(
                f"tokenizers/sentencepiece: eod '{piece}' is no piece of path '{self.config.path}'; set eod to one of "
                f"its pieces"
            )
        return number
