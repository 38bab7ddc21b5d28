"""The tokenizer of conversations, for commands that sample answers: it writes prompts, and knows where answers end."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mplug import UsageError
from mplug_tokenization.contract import CorpusTokenizer
from mplug_tokenization.templates import ANSWERS, Template
from mplug_tokenization.vocabulary import Vocabulary

PROBE = "An answer."
PLACE, PLACE_TOKEN = "\ufdd0", -1
"""What stands for a medium in a text and in its tokens; Unicode reserves the character for internal use."""


class ChatVocabulary(Vocabulary):
    """The tokens of a tokenizer and of a chat template's special tokens, and the template."""

    def __init__(
        self,
        tokenizer: CorpusTokenizer,
        special: Sequence[str],
        template: Template,
        places: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(tokenizer, special, places)
        self.template = template

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The token that the template writes at the end of an answer; empty if it writes no special token there."""
        messages = [{"role": "user", "content": "A question?"}, {"role": ANSWERS, "content": PROBE}]
        try:
            rendered = self.template.render(messages)
        except ValueError:  # a template that supports no such conversation states no end
            return frozenset()
        _, _, end = rendered.text[slice(*rendered.answers[-1])].partition(PROBE)
        first = next((token for token in self.encode(end.strip()) if token in self.texts), None)
        return frozenset() if first is None else frozenset((first,))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation and of the header of the next answer. UsageError if the template fails.

        If the template supports texts only, a part that is no text becomes the token -1, in the place of the part.
        """
        if not self.template.takes_parts:
            messages = [{**message, "content": _as_text(message.get("content"))} for message in messages]
        try:
            pieces = self.template.text(messages, prompt=True).split(PLACE)
        except ValueError as error:
            raise UsageError(str(error)) from None
        first, *others = (self.encode(piece) for piece in pieces)
        return [*first, *(token for other in others for token in (PLACE_TOKEN, *other))]


def _as_text(content: Any) -> Any:
    """The parts of a message as one text, with the character of places for parts that are no text."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if part.get("type") == "text" else PLACE for part in content)
