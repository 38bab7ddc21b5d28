"""The task encoder of conversations with pictures and videos.

`S` sequence length, `M` documents of a packed sample, `n` tokens of a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from megatron.energon import Cooker, CrudeSample, DefaultTaskEncoder, basic_sample_keys, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import Sample
from torch import Tensor

from mplug import IGNORED, Medium, Processor
from mplug_energon.config import EnergonConfig
from mplug_energon.faults import Unusable
from mplug_energon.media import Files, prepare_media
from mplug_energon.messages import INVALID, Conversation, read_conversation
from mplug_energon.packing import Size, pack
from mplug_tokenization.templates import Template
from mplug_tokenization.vocabulary import Encoded, Vocabulary

PLACE = "\ufdd0"
"""Stands for a medium in the text of a template that supports text only; Unicode reserves it for internal use."""
PLACE_TOKEN = -1
PLACES = {PLACE: PLACE_TOKEN}
TOO_LARGE, TOO_LONG, NO_ANSWER = "a picture that is too large", "a text that is too long", "no answer"
SPECIAL, FAILING = "a special token in a text", "a template that fails"
UNBOUNDED = 1 << 62


@edataclass
class Raw(Sample):
    """The files of a sample."""

    files: Files


@edataclass
class Talk(Sample):
    """A conversation: tokens [n], labels [n], and its media in order."""

    tokens: Tensor
    labels: Tensor
    media: tuple[Medium, ...]

    @property
    def size(self) -> Size:
        """Its tokens, and the rows of its media."""
        return Size(len(self.tokens), sum(medium.rows for medium in self.media))


@edataclass
class Filled(Sample):
    """A sample: tokens [S], labels [S], positions [S] and its media in order."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    media: tuple[Medium, ...]


@edataclass
class Packed(Filled):
    """A sample of several conversations with their lengths [M]; the unfilled end is one more document."""

    document_lengths: Tensor


@stateless
def cook(crude: CrudeSample) -> Raw:
    """The files of a sample of an untyped data set."""
    folders = [source.dataset_path for source in crude["__sources__"]]
    folder = Path(str(folders[0].local_path())) if folders and folders[0].is_local() else None
    own = {name: content for name, content in crude.items() if isinstance(content, bytes)}
    return Raw(**basic_sample_keys(crude), files=Files(crude["__key__"], own, folder))


class Conversations(DefaultTaskEncoder):
    """Encodes a conversation per sample: its messages by the chat template, its pictures by the model's processor.

    With `data.packing_buffer_size`, conversations share samples. Without it, each has a sample of its own.
    """

    cookers = (Cooker(cook),)
    decoder = None

    def __init__(
        self, config: EnergonConfig, template: Template, vocabulary: Vocabulary, processor: Processor, seq_length: int
    ) -> None:
        super().__init__()
        self.config, self.seq_length, self.processor = config, seq_length, processor
        self.text = Writer(template, vocabulary, processor)
        self.vocab_size = self.text.vocab_size
        self.budget = Size(seq_length, UNBOUNDED if config.max_rows is None else config.max_rows)
        eod = vocabulary.tokenizer.eod
        unused = (token for token in (eod, *range(self.vocab_size)) if token not in processor.placeholders)
        self.filler = next(token for token in unused if token is not None)

    @stateless
    def encode_sample(self, sample: Sample) -> Talk | Filled:
        """The tokens, labels and media of a conversation. Raises Unusable if it cannot be used."""
        if not isinstance(sample, Raw):
            raise Unusable(
                f"it is a {type(sample).__name__}; prepare data sets of conversations with --sample-type "
                f"CrudeWebdataset",
                INVALID,
            )
        if "json" not in sample.files.own:
            raise Unusable(f"it has no file '.json' (but {', '.join(sample.files.own) or 'none'})", INVALID)
        conversation = read_conversation(sample.files.own["json"], self.config.picture_mark)
        media = prepare_media(conversation, sample.files, self.processor, self.config.max_pixels)
        written = self._cut(self.text.write(conversation, media))
        tokens, labels = written.labelled()
        talk = Talk.derive_from(sample, tokens=tokens, labels=labels, media=tuple(written.media))
        return talk if self.config.packing_buffer_size is not None else self._filled(talk)

    def select_samples_to_pack(self, samples: list[Talk]) -> list[list[Talk]]:
        """The conversations of each sample."""
        packed = pack([talk.size for talk in samples], self.budget, self.config.max_documents - 1)
        return [[samples[number] for number in members] for members in packed]

    @stateless
    def pack_selected_samples(self, samples: list[Talk]) -> Packed:
        """One sample of these conversations; positions start again in each."""
        lengths = [len(talk.tokens) for talk in samples]
        lengths += [self.seq_length - sum(lengths)] if sum(lengths) < self.seq_length else []
        spread = torch.zeros(self.config.max_documents, dtype=torch.int64)
        spread[: len(lengths)] = torch.tensor(lengths)
        return Packed.derive_from(
            samples[0],
            tokens=self._padded([talk.tokens for talk in samples], self.filler),
            labels=self._padded([talk.labels for talk in samples], IGNORED),
            positions=torch.cat([torch.arange(length) for length in lengths]),
            media=tuple(medium for talk in samples for medium in talk.media),
            document_lengths=spread,
        )

    def _filled(self, talk: Talk) -> Filled:
        return Filled.derive_from(
            talk,
            tokens=self._padded([talk.tokens], self.filler),
            labels=self._padded([talk.labels], IGNORED),
            positions=torch.arange(self.seq_length),
            media=talk.media,
        )

    def _padded(self, rows: list[Tensor], value: int) -> Tensor:
        row = torch.cat(rows)
        return torch.cat((row, row.new_full((self.seq_length - len(row),), value)))

    def _cut(self, written: "Written") -> "Written":
        """A conversation within the budget: its beginning, before the first medium that is not within it."""
        length, rows, kept = self.seq_length, 0, 0
        for begin, medium in zip(written.begins, written.media, strict=True):
            alone = Size(len(medium.tokens), medium.rows)
            if alone.tokens > self.budget.tokens or alone.rows > self.budget.rows:
                raise Unusable(
                    f"a picture of {alone.tokens} tokens and {alone.rows} rows is larger than a sample "
                    f"(trainer.seq_length={self.seq_length}, data.max_rows={self.config.max_rows})",
                    TOO_LARGE,
                )
            rows += medium.rows
            if begin + len(medium.tokens) > length or rows > self.budget.rows:
                length = min(length, begin)
                break
            kept += 1
        whole = kept == len(written.media) and len(written.tokens) <= self.seq_length + 1
        if not whole and self.config.too_long == "refuse":
            rows = sum(medium.rows for medium in written.media)
            raise Unusable(
                f"it has {len(written.tokens)} tokens and {rows} rows (trainer.seq_length={self.seq_length}, "
                f"data.max_rows={self.config.max_rows})",
                TOO_LONG,
            )
        if not any(written.answers[1 : length + 1]):
            raise Unusable(f"it has no answer (a message of the role 'assistant') in {length} tokens", NO_ANSWER)
        return Written(written.tokens, written.answers, written.begins[:kept], written.media[:kept], length)


@dataclass(frozen=True)
class Written:
    """The tokens of a conversation, whether each is a target, and its media with the places of their first tokens.

    `length` is the number of tokens that a sample has of it.
    """

    tokens: list[int]
    answers: list[bool]
    begins: list[int]
    media: list[Medium]
    length: int

    def labelled(self) -> tuple[Tensor, Tensor]:
        """(tokens [n], labels [n]); a label is the next token if it belongs to an answer."""
        tokens, targets = torch.tensor(self.tokens), torch.tensor(self.answers)
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(targets[1:], tokens[1:], IGNORED)
        return tokens[: self.length], labels[: self.length]


class Writer:
    """Writes conversations as tokens. The vocabulary has the token of places.

    A template that supports parts writes marks for a medium itself; the medium's tokens replace them. In the text of
    any other template, this class writes a place for each medium.
    """

    def __init__(self, template: Template, vocabulary: Vocabulary, processor: Processor) -> None:
        self.template, self.vocabulary, self.processor = template, vocabulary, processor
        marks = processor.placeholders | frozenset(vocabulary.special.values())
        self.marks = marks if template.takes_parts else frozenset({PLACE_TOKEN})
        example = processor.prepare(torch.zeros(1, 64, 64, 3, dtype=torch.uint8)).tokens
        self.vocab_size = max(vocabulary.vocab_size, *(token + 1 for token in (*processor.placeholders, *example)))

    def write(self, conversation: Conversation, media: Sequence[Medium]) -> Written:
        """The tokens of a conversation with these media. Raises Unusable."""
        for text in conversation.texts:
            if self.vocabulary.has_special(text):
                raise Unusable("a message has the text of a special token, which could end its turn", SPECIAL)
        messages = conversation.messages[: conversation.end]
        media = media[: sum(part["type"] != "text" for message in messages for part in message["content"])]
        if not self.template.takes_parts:
            messages = [{**message, "content": _as_text(message)} for message in messages]
        try:
            rendered = self.template.render(messages, conversation.tools)
            rendered.text.encode()
        except UnicodeEncodeError:
            raise Unusable("it has an unpaired surrogate in a text", INVALID) from None
        except ValueError as error:
            raise Unusable(str(error), FAILING) from None
        return self._with_media(self.vocabulary.encode_answers(rendered.text, rendered.answers), media)

    def _with_media(self, encoded: Encoded, media: Sequence[Medium]) -> Written:
        """The tokens with those of the media in their places."""
        tokens, answers, begins, at = list[int](), list[bool](), list[int](), 0
        unread = list(media)
        while at < len(encoded.tokens):
            width = _marks_of(unread[0], encoded.tokens, at, self.marks) if unread else 0
            if width:
                begins.append(len(tokens))
                own = unread.pop(0).tokens
                tokens += own
                answers += [False] * len(own)
            else:
                tokens.append(encoded.tokens[at])
                answers.append(encoded.answers[at])
            at += max(width, 1)
        expected = sum(token in self.processor.placeholders for medium in media for token in medium.tokens)
        found = sum(token in self.processor.placeholders for token in tokens)
        if unread or found != expected or PLACE_TOKEN in tokens:
            raise Unusable(
                f"data.template '{self.template.name}' writes marks of {len(media) - len(unread)} of its {len(media)} "
                f"pictures, or more; use the tokenizer and the template of the model",
                FAILING,
            )
        return Written(tokens, answers, begins, list(media), len(tokens))


def _as_text(message: dict[str, Any]) -> str | None:
    """The content of a message as text; None if there is none."""
    parts = message["content"]
    return "".join(part["text"] if part["type"] == "text" else PLACE for part in parts) if parts else None


def _marks_of(medium: Medium, tokens: Sequence[int], at: int, marks: frozenset[int]) -> int:
    """The number of tokens from `at` on that mark a medium: the place of one, or `marks` in the order of its tokens."""
    if tokens[at] == PLACE_TOKEN:
        return 1
    order = [token for token, _ in groupby(medium.tokens) if token in marks]
    end = at
    while end < len(tokens) and tokens[end] in order:
        order = order[order.index(tokens[end]) + 1 :]
        end += 1
    return end - at
