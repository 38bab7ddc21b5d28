"""The streams of prompts with media (pictures) while texts are sampled after them.

b texts of this rank, with padding in front of the shorter ones, and all tokens that they will have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug import WHOLE_SEQUENCE, Plan, RunError, Unit
from mplug_streams import Medium, Processor
from mplug_tokenization.encoder_texts import entries_of_texts

ALONG = frozenset({"sequence", WHOLE_SEQUENCE})
"""The axes of the tokens."""


def units_of(plan: Plan, entries: Mapping[str, Tensor]) -> tuple[Unit, ...]:
    """The inference units that compute a micro batch: those of streams only if it has their entries."""
    return plan.inference if plan.stream_entries <= entries.keys() else plan.without_streams(plan.inference)


@dataclass(frozen=True)
class Media:
    """The media of the prompts of a batch, and what makes entries of them.

    `prepare` prepares the media of a prompt by its number. `own` leaves the rows of streams that this rank computes.
    """

    processor: Processor
    plan: Plan
    prepare: Callable[[int], Sequence[Medium]]
    own: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

    def text_behind(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of last tokens that stand for no medium in any of the prompts."""
        reserved = self.processor.placeholders
        backwards = (enumerate(reversed(prompt)) for prompt in prompts)
        found = [next((back for back, token in one if token in reserved), None) for one in backwards]
        return min((back for back in found if back is not None), default=max(map(len, prompts)))

    def seen(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        length: int,
        more: int,
        text: int,
        device: torch.device,
    ) -> "Seen":
        """The entries of texts with the `numbers`, for prompts of `length` tokens with padding, and `more` tokens.

        The last `text` tokens of all prompts stand for no medium. A token that will be sampled is text, whatever it is.
        """
        filler = next(token for token in range(len(self.processor.placeholders) + 1) if self._is_text(token))
        tokens = torch.full((len(prompts), length + more), filler)
        padding = [length - len(prompt) for prompt in prompts]
        for row, prompt, before in zip(tokens, prompts, padding, strict=True):
            row[before:length] = torch.tensor(prompt)
        lengths = torch.tensor([[before, length + more - before] for before in padding])
        media = [self.prepare(number) for number in numbers]
        try:
            made = self.processor.entries_of(tokens, media, lengths if any(padding) else None)
        except ValueError as error:
            raise RunError(f"the media of prompts cannot be placed: {error}; a file may have changed") from error
        entries = {name: x.to(device) for name, x in self.own(made).items()}
        axes = {name: self.plan.context[name] for name in entries}
        along = {name: dim for name in axes for dim, axis in enumerate(axes[name]) if axis in ALONG}
        return Seen(self.plan, entries, along, length - text)

    def _is_text(self, token: int) -> bool:
        return token not in self.processor.placeholders


@dataclass(frozen=True)
class EncoderTexts:
    """The prompts of a batch as texts of the model's encoder; the decoder's texts begin with `Plan.answering`.

    `own` leaves the rows that this rank computes.
    """

    plan: Plan
    texts: Sequence[Sequence[int]]
    own: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

    def text_behind(self, prompts: Sequence[Sequence[int]]) -> int:
        """All tokens of the decoder are text."""
        return max(map(len, prompts))

    def seen(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        length: int,
        more: int,
        text: int,
        device: torch.device,
    ) -> "Seen":
        """The entries of the texts with the `numbers`, for the first tokens of the decoder."""
        own = [torch.tensor([*self.texts[number]]) for number in numbers]
        made = entries_of_texts(own, torch.arange(len(own)), max(map(len, own)))
        return Seen(self.plan, {name: x.to(device) for name, x in self.own(made).items()}, {}, 0)


@dataclass(frozen=True)
class Seen:
    """The entries of texts. `along` has the dimension of those along the tokens; tokens from `text` on have no rows."""

    plan: Plan
    all: Mapping[str, Tensor]
    along: Mapping[str, int]
    text: int

    def entries(self, begin: int, end: int) -> dict[str, Tensor]:
        """The entries of a range of tokens; those of streams are among them if the range has rows, or begins at 0."""
        found = {name: self.all[name].narrow(dim, begin, end - begin) for name, dim in self.along.items()}
        if begin == 0 or begin < self.text:
            return {**self.all, **found}
        return {name: found[name] for name in self._of_text()}

    def later(self, begin: int) -> "Later":
        """The entries of tokens of text from `begin` on, one by one."""
        found = {
            name: self.all[name].narrow(dim, begin, self.all[name].shape[dim] - begin).contiguous()
            for name, dim in self.along.items()
        }
        return Later({name: found[name] for name in self._of_text()}, self.along)

    def _of_text(self) -> list[str]:
        indices = {name for stream in self.plan.streams.values() for name in stream.indices}
        return [name for name in self.along if name not in indices]


@dataclass(frozen=True)
class Later:
    """Entries of tokens, of which a step on the device takes one."""

    all: Mapping[str, Tensor]
    along: Mapping[str, int]

    def entries(self, index: Tensor) -> dict[str, Tensor]:
        """The entries of token number `index` (an int64 scalar on the device)."""
        return {name: x.index_select(self.along[name], index[None]) for name, x in self.all.items()}
