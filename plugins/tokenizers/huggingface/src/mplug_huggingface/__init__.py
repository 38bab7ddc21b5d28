"""Tokenizers of the `tokenizers` library, loaded from a tokenizer.json."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers
    from numpy.typing import NDArray

    from mplug_huggingface.folder import Folder

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""Common names of the token that ends a document; the first one that is a special token of the file is used."""

REMEMBERED = 1 << 17
"""Words in the library's cache: about 20 MB, and a tenth of the time."""


SPACES = ("\u0120", "\u2581")
"""A space at the beginning of a token: of byte-level vocabularies, and of those of SentencePiece."""


class FileTokenizer:
    """Encodes and decodes by a tokenizer.json, without the special tokens that its post-processor would add."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", eod: int | None) -> None:
        self.tokenizer, self.eod = tokenizer, eod
        self.special_tokens = _special_tokens(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # the text of a special token is plain text
        resize = getattr(tokenizer.model, "_resize_cache", None)
        if resize is not None:  # a corpus has more words than the 10,000 of the default
            resize(REMEMBERED)
        from mplug_huggingface.words import words_of  # imports numpy, which a list of plugins does not need

        self.words = words_of(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Construct it again when it is unpickled, because the library's pickle loses `encode_special_tokens`."""
        return FileTokenizer, (self.tokenizer, self.eod)

    @cached_property
    def continuing(self) -> list[bool] | None:
        """For each token, whether it continues the word of the token before it; None if the tokens do not tell.

        Word pieces have a prefix ('##') then. In other vocabularies a word begins with a space, so punctuation behind
        a word continues it.
        """
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        prefix = getattr(self.tokenizer.model, "continuing_subword_prefix", None)
        found = [True] * self.vocab_size
        if prefix:
            for text, number in vocabulary.items():
                found[number] = text.startswith(prefix)
            return found
        mark = next((one for one in SPACES if any(text.startswith(one) for text in vocabulary)), None)
        if mark is None:
            return None
        for text, number in vocabulary.items():
            found[number] = not text.startswith(mark)
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        (tokens,) = self.encode_batch([text])
        return tokens if isinstance(tokens, list) else tokens.tolist()

    def encode_batch(self, texts: Sequence[str]) -> "list[list[int]] | list[NDArray[Any]]":
        """The tokens of each text: word by word if that gives the same tokens (`words`), else by the library.

        Raises UsageError if the tokenizer has no token for a part of a text, not even an unknown token.
        """
        try:
            return self._by_library(texts) if self.words is None else self.words.encode_batch(texts, self._by_library)
        except Exception as error:  # the library raises Exception itself
            raise UsageError(
                f"tokenizers/huggingface: the tokenizer cannot encode a text: {_one_line(error)}; correct its "
                f"tokenizer.json"
            ) from None

    def _by_library(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode by the library, without offsets into the texts, which would cost a fifth of the time."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class HuggingFace:
    """A tokenizer.json of the `tokenizers` library: byte-pair encoding, unigram, word pieces."""

    files = ("path",)

    class Config(BaseModel):
        """The file, and the token that ends a document."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="the file tokenizer.json")
        eod: str | None = Field(
            None, description=f"the token that ends a document; null: the first of {', '.join(ENDS)} that is special"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> FileTokenizer:
        """Read the file; raise UsageError if it is not a tokenizer.json, has no tokens, or lacks the `eod` token."""
        import os

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the contract: no threads of its own
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(self.config.path)
        except Exception as error:  # the library raises Exception itself
            raise UsageError(
                f"tokenizers/huggingface: the `tokenizers` library cannot read path '{self.config.path}': "
                f"{_one_line(error)}; set path to a model's tokenizer.json"
            ) from None
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise UsageError(
                f"tokenizers/huggingface: path '{self.config.path}' has no tokens; use another tokenizer.json"
            )
        return FileTokenizer(tokenizer, self._eod(tokenizer))

    @staticmethod
    def read_folder(folder: "Path") -> "Folder":
        """The tokenizer of a published model, with its chat template."""
        from mplug_huggingface.folder import Folder

        return Folder(folder)

    def _eod(self, tokenizer: Any) -> int | None:
        if self.config.eod is not None:
            number: int | None = tokenizer.token_to_id(self.config.eod)
            if number is None:
                raise UsageError(
                    f"tokenizers/huggingface: eod '{self.config.eod}' is no token of path '{self.config.path}'; set "
                    f"eod to one of its tokens"
                )
            return number
        special = _special_tokens(tokenizer)
        return next((special[end] for end in ENDS if end in special), None)


def _one_line(error: Exception) -> str:
    """The library's message on one line."""
    return " ".join(str(error).split())


def _special_tokens(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """Text of a special token -> its number."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
