"""What loaders of conversations share. Importing this module imports no torch."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug_tokenization.records import TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mplug_tokenization.templates import Template
    from mplug_tokenization.vocabulary import Vocabulary


class ChatLoader:
    """The tokenizer, the chat template and the vocabulary that the config of a loader names.

    A subclass sets `config`, whose fields are `tokenizer`, `tokenizer_options`, `template`, `template_variables` and
    `special_tokens`.
    """

    config: Any

    @staticmethod
    def folder_settings(folder: Path, tokenizer: str, options: dict[str, Any]) -> dict[str, Any]:
        """The tokenizer and the chat template of the published checkpoint with which a run begins."""
        from mplug_tokenization.templates import has_template

        found: dict[str, Any] = {"tokenizer": tokenizer, "tokenizer_options": options}
        return found | ({"template": str(folder.absolute())} if has_template(folder) else {})

    @cached_property
    def template(self) -> "Template":
        """The chat template, read once."""
        from mplug_tokenization.templates import read_template

        return read_template(self.config.template, self.config.template_variables)

    @cached_property
    def tokenizer(self) -> TokenizerRecord:
        """The tokenizer that the config names."""
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """The tokenizer's tokens, the template's special tokens, and the template: a `ChatVocabulary`."""
        from mplug_tokenization.chat import ChatVocabulary

        return ChatVocabulary(load_tokenizer(self.tokenizer), self._special, self.template)

    def vocabulary_for(self, prompt: Any) -> "Vocabulary":
        """The vocabulary with which commands sample, by a prompt of the data: of conversations, or of plain texts."""
        from mplug_tokenization.vocabulary import TextVocabulary

        is_text = isinstance(prompt, str)
        return TextVocabulary(load_tokenizer(self.tokenizer), self._special) if is_text else self.vocabulary

    @property
    def _special(self) -> "Sequence[str]":
        own: Sequence[str] | None = self.config.special_tokens
        return self.template.special if own is None else own
