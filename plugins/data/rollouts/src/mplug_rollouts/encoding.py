"""Encodes prompts, and completions that lines have."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_rollouts.config import RolloutsConfig
from mplug_rollouts.groups import Item, advantages
from mplug_rollouts.lines import Prompt
from mplug_rollouts.sources import Encoded
from mplug_tokenization.json_lines import REMEDY

if TYPE_CHECKING:
    from mplug_tokenization.chat import ChatVocabulary


@dataclass
class Count:
    """Counts of a split's prompts, by outcome."""

    prompts: int = 0
    too_long: int = 0
    with_special_tokens: int = 0

    @property
    def dropped(self) -> int:
        """The number of prompts that are not used."""
        return self.too_long + self.with_special_tokens

    def __str__(self) -> str:
        return f"dropped: {self.too_long} too long, {self.with_special_tokens} with a special token in their text"


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts of up to `length` tokens."""

    vocabulary: "ChatVocabulary"
    length: int

    def of(self, prompts: Iterable[Prompt], count: Count) -> list[Encoded]:
        """The prompts that are kept; `count` counts all. UsageError names a line that fails."""
        found = []
        for prompt in prompts:
            count.prompts += 1
            content = prompt.content
            texts = [content] if isinstance(content, str) else [one.get("content") or "" for one in content]
            if prompt.tokens is None and any(map(self.vocabulary.has_special, texts)):
                count.with_special_tokens += 1
                continue
            try:
                tokens = prompt.tokens or tuple(self._tokens(prompt))
            except UnicodeEncodeError:
                raise UsageError(f"{prompt.where} has an unpaired surrogate in a text; {REMEDY}") from None
            except UsageError as error:
                raise UsageError(f"{prompt.where}: {error}") from None
            if len(tokens) > self.length or not tokens:
                count.too_long += 1
                continue
            found.append(Encoded(prompt, tokens))
        return found

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt.content, str):
            return self.vocabulary.encode(prompt.content)
        return self.vocabulary.encode_chat(prompt.content)


def ends_of(vocabulary: "ChatVocabulary", *, is_chat: bool) -> frozenset[int]:
    """The tokens that end a completion: what the template writes behind an answer, or the end of text."""
    end = vocabulary.tokenizer.eod
    of_text = frozenset() if end is None else frozenset({end})
    return (vocabulary.end_tokens or of_text) if is_chat else of_text


def given_items(prompts: Iterable[Encoded], vocabulary: "ChatVocabulary", config: RolloutsConfig) -> list[list[Item]]:
    """The completions of lines with their advantages, those of each prompt."""
    found = []
    for one in prompts:
        group = []
        ends = sorted(ends_of(vocabulary, is_chat=not isinstance(one.prompt.content, str)))[:1]
        for given in one.prompt.completions:
            tokens = given.tokens or (*vocabulary.encode(given.text or ""), *([] if given.truncated else ends))
            if not 0 < len(tokens) <= config.max_tokens or max(tokens) >= vocabulary.vocab_size:
                raise UsageError(
                    f"{one.prompt.where} has a completion of {len(tokens)} tokens up to {max(tokens, default=0)}; "
                    f"completions have 1 to data.max_tokens={config.max_tokens} tokens below {vocabulary.vocab_size}"
                )
            group.append(Item(one.tokens, tokens, given.log_probabilities or (), given.reward, 0.0, given.truncated))
        found.append(group)
    values = advantages([[one.reward for one in group] for group in found], config.scale)
    return [
        [Item(**{**vars(one), "advantage": value}) for one, value in zip(group, own, strict=True)]
        for group, own in zip(found, values, strict=True)
    ]
