"""Byte-pair encoding by tiktoken, from a local file of ranks, without downloads."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tiktoken import Encoding

END = "<|endoftext|>"
PROBE = "A word, 12 numbers;\n\tline's end? \u4e16\u754c \U0001f30d\r\n  _"
"""Text with an example of each kind of match of a pattern."""


class RanksTokenizer:
    """A tiktoken encoding; `eod` is the special token that ends a document."""

    def __init__(self, encoding: "Encoding", eod: int | None) -> None:
        self.encoding, self.eod = encoding, eod
        self.special_tokens: dict[str, int] = dict(encoding._special_tokens)
        self.vocab_size: int = encoding.max_token_value + 1
        self._decodable = frozenset(encoding._mergeable_ranks.values())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[NDArray[Any]]":
        """The tokens of each text, as arrays."""
        return [self.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special tokens and unknown numbers are omitted."""
        return self.encoding.decode([token for token in tokens if token in self._decodable])


class Tiktoken:
    """A file of ranks, *.tiktoken, and the pattern that splits a text before bytes are merged."""

    files = ("path",)

    class Config(BaseModel):
        """The file, and the settings that the file lacks."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="the file of ranks, *.tiktoken: a token in base64 and its rank on each line")
        pattern: str | None = Field(
            None, description="regular expression that splits a text into pieces; null: GPT-2's (r50k, p50k)"
        )
        eod: str | None = Field(END, min_length=1, description="the special token that ends a document; null: none")
        eod_id: int | None = Field(
            None, ge=0, lt=2**31 - 1, description="number of the token eod; null: one more than the largest rank"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> RanksTokenizer:
        """Read the file; raise UsageError if it is invalid, the pattern fails, or `eod_id` is a rank of the file."""
        from tiktoken import Encoding
        from tiktoken_ext.openai_public import r50k_pat_str

        from mplug_tiktoken.ranks import read_ranks

        config = self.config
        ranks = read_ranks(config.path)
        eod = None
        if config.eod is not None:
            eod = config.eod_id if config.eod_id is not None else max(ranks.values()) + 1
            if eod in ranks.values():
                raise UsageError(
                    f"tokenizers/tiktoken: eod_id={eod} is a rank of path '{config.path}'; set eod_id to an unused "
                    f"number"
                )
        special = {config.eod: eod} if config.eod is not None and eod is not None else {}
        pattern = config.pattern or r50k_pat_str
        try:
            encoding = Encoding(config.path, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except ValueError as error:
            raise UsageError(
                f"tokenizers/tiktoken: pattern '{pattern}' is not valid: {error}; use that of the file's model"
            ) from None
        if encoding.decode_bytes(encoding.encode_ordinary(PROBE)) != PROBE.encode():
            raise UsageError(
                f"tokenizers/tiktoken: pattern '{pattern}' does not match all text, so tokens would be missing; use "
                f"that of the file's model"
            )
        return RanksTokenizer(encoding, eod)
