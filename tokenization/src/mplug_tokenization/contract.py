"""What a plugin of the kind `tokenizers` builds, and the tokenizer of a published folder."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    If a tokenizer states its `vocab_size`, the host never decodes a token that is not less than it, however many tokens
    the model has. A tokenizer of conversations may state `end_tokens`, a frozenset of tokens that end an answer, and
    have `encode_chat`, as `FolderTokenizer` does: `mplug generate` then ends texts there, and takes --chat. A part that
    is no text becomes the token -1 if the template supports texts only.
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens.

        If the text spells a special token, that part is encoded as plain text.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""


class CorpusTokenizer(Tokenizer, Protocol):
    """What a plugin of the kind `tokenizers` builds, fit for encoding whole corpora.

    Every encoding process builds one, and uses it from one thread at a time. A tokenizer with special tokens may state
    `special_tokens`, a mapping from their texts to their numbers. Code that writes such a text on purpose (chat
    templates) cuts it out of the text and inserts the number. A tokenizer whose tokens tell where words begin may state
    `continuing`: for each token, whether it continues the word of the token before it (masks of whole words need it).
    """

    vocab_size: int
    """Every token is less than this, including `eod`."""
    eod: int | None
    """The token that ends a document and occurs in no text; None if the vocabulary has none."""

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[Sequence[int] | NDArray[Any]]":
        """The tokens of each text, equal to those of `encode`.

        They are lists or one-dimensional integer arrays, whichever is faster. The method uses one CPU core only: the
        caller starts the number of processes that it wants.
        """


class FolderTokenizer(Protocol):
    """The tokenizer of a published model, read from its folder, for commands that read or write its text.

    A plugin of the kind `tokenizers` that reads such folders has a static method `read_folder(folder: Path)`, which
    returns this object. Its distribution names the file that it needs in the entry-point group
    'mplug.tokenizer_files': `"tokenizer.json" = "NAME"`, where NAME is the plugin's own entry point.
    """

    begin: tuple[int, str] | None
    """The number and the text of the token in front of a text; None if the folder names none."""
    end: tuple[int, str] | None
    """The number and the text of the token that ends a text; None if the folder names none."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without special tokens around it."""

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, with the special tokens that the folder's tokenizer adds to a text."""

    def encode_part(self, text: str) -> list[int]:
        """The tokens of a part of a text, without added special tokens."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation and of the header of the next answer, by the folder's chat template.

        Each message has a `role` and a `content`: a text, or a list of parts. A part has a `type`: that of a text has
        the field `text`; for that of a medium, the template writes a mark (`Medium.mark`). Raises UsageError if the
        folder has no chat template, or if the template does not support the messages.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""
