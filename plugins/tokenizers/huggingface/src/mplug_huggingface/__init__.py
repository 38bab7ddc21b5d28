"""Tokenizers of the `tokenizers` library, from their one file, tokenizer.json."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    import tokenizers
    from numpy.typing import NDArray

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""What families call the token that ends a document; the first that a file has as a special token is taken."""

REMEMBERED = 1 << 17
"""Words whose tokens are remembered: about 20 MB, for a tenth of the time."""


class FileTokenizer:
    """A tokenizer.json, without the special tokens that its post-processor would put around a text."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", eod: int | None) -> None:
        self.tokenizer, self.eod = tokenizer, eod
        self.special_tokens = _special_tokens(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # what looks like a special token in a text is text
        resize = getattr(tokenizer.model, "_resize_cache", None)
        if resize is not None:  # words of a corpus are more than the 10,000 that are remembered by default
            resize(REMEMBERED)
        from mplug_huggingface.words import words_of  # numpy is for encoding, not for a list of plugins

        self.words = words_of(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew where it is unpickled: the library forgets `encode_special_tokens`."""
        return FileTokenizer, (self.tokenizer, self.eod)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        (tokens,) = self.encode_batch([text])
        return tokens if isinstance(tokens, list) else tokens.tolist()

    def encode_batch(self, texts: Sequence[str]) -> "list[list[int]] | list[NDArray[Any]]":
        """The tokens of each text: word by word where that is the same (`words`), else by the library.

        UsageError where the tokenizer has no token for some of it, not even an unknown one.
        """
        try:
            return self._by_library(texts) if self.words is None else self.words.encode_batch(texts, self._by_library)
        except Exception as error:  # the library raises Exception itself
            raise UsageError(
                f"tokenizers/huggingface: the tokenizer cannot encode a text: {_words(error)}; mend its tokenizer.json"
            ) from None

    def _by_library(self, texts: Sequence[str]) -> list[list[int]]:
        """Offsets into the texts, which would cost a fifth of the time, are left out."""
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class HuggingFace:
    """A tokenizer.json of the `tokenizers` library: byte-pair encoding, unigram, word pieces."""

    files = ("path",)

    class Config(BaseModel):
        """The file, and which of its tokens ends a document."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="the file tokenizer.json")
        eod: str | None = Field(
            None, description=f"the token that ends a document; null: the first special one of {', '.join(ENDS)}"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> FileTokenizer:
        """Read the file; UsageError where it is none, or where it has no such `eod`."""
        import os

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the contract: no threads of its own
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(self.config.path)
        except Exception as error:  # the library raises Exception itself
            raise UsageError(
                f"tokenizers/huggingface: '{self.config.path}' is no tokenizer.json that tokenizers reads: "
                f"{_words(error)}; name the file tokenizer.json that a model comes with"
            ) from None
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise UsageError(f"tokenizers/huggingface: '{self.config.path}' has no tokens; name another tokenizer.json")
        return FileTokenizer(tokenizer, self._eod(tokenizer))

    def _eod(self, tokenizer: Any) -> int | None:
        wanted = self.config.eod
        if wanted is not None:
            found: int | None = tokenizer.token_to_id(wanted)
            if found is None:
                raise UsageError(f"tokenizers/huggingface: '{self.config.path}' has no token '{wanted}' to be its eod")
            return found
        special = _special_tokens(tokenizer)
        return next((special[end] for end in ENDS if end in special), None)


def _words(error: Exception) -> str:
    """What the library says, on one line."""
    return " ".join(str(error).split())


def _special_tokens(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """The texts of special tokens, and their numbers."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
