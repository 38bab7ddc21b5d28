"""What loaders of conversations share. Importing this module imports no torch."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug_tokenization.records import TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
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

        special = self.template.special if self.config.special_tokens is None else self.config.special_tokens
        return ChatVocabulary(load_tokenizer(self.tokenizer), special, self.template)
