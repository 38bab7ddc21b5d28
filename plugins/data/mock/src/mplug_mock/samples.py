"""Samples of random tokens, and of random media among them. B samples, S sequence length, M documents of a sample."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import ADVANTAGES, IGNORED, SAMPLED, SEQUENCES, MicroBatch
from mplug_streams import Medium

if TYPE_CHECKING:
    from mplug_streams import Processor

Spans = list[tuple[int, int]]
"""The first position of each medium in a sample, and the number of its tokens."""


RATE = 2.0
"""Frames of a video in a second."""


@dataclass(frozen=True)
class Media:
    """Up to `most` media in a sample: noise whose height and width are between the two `sides`.

    The number of frames is between the two `frames`; more than one are a video.
    """

    processor: "Processor"
    most: int
    sides: tuple[int, int]
    frames: tuple[int, int]
    vocab_size: int

    def drawn(self, generator: torch.Generator) -> list[Medium]:
        """The media of a sample; each number of them is equally likely."""
        number = int(torch.randint(self.most + 1, (), generator=generator))
        return [self._one(generator, number) for _ in range(number)]

    def _one(self, generator: torch.Generator, number: int) -> Medium:
        least, largest = self.sides
        height, width = torch.randint(least, largest + 1, (2,), generator=generator).tolist()
        frames = self._frames(generator)
        colours = torch.randint(256, (frames, height, width, 3), generator=generator, dtype=torch.uint8)
        if frames == 1:
            return self.processor.prepare(colours, number)
        found: Medium = self.processor.prepare_video(colours, RATE, self._encode)  # type: ignore[attr-defined]
        return found

    def _frames(self, generator: torch.Generator) -> int:
        least, largest = self.frames
        return least if least == largest else int(torch.randint(least, largest + 1, (), generator=generator))

    def _encode(self, text: str) -> list[int]:
        """Tokens for the bytes of a text, none of which is a placeholder."""
        free = [token for token in range(self.vocab_size) if token not in self.processor.placeholders]
        return [free[byte % len(free)] for byte in text.encode()]


def reader(
    seed: int,
    vocab_size: int,
    length: int,
    documents: int,
    media: Media | None = None,
    *,
    is_weighted: bool = False,
    in_pairs: bool = False,
    of_rollouts: bool = False,
) -> Callable[[Sequence[int]], MicroBatch]:
    """A function that makes samples of `length` tokens by their numbers, each with this number of documents.

    In a packed sample, positions restart at 0 in every document, and a document's last token has no target. A medium
    lies within a document; one for which a sample has no room is left out. If samples are weighted, the losses of each
    document have a random weight. In pairs, documents are answers
    (`sequences`). Of rollouts, they are completions.
    """
    positions = torch.arange(length)[None]

    def read(sample_ids: Sequence[int]) -> MicroBatch:
        windows, lengths, in_samples, weights = [], [], [], []
        generator = torch.Generator()
        for number in sample_ids:
            generator.manual_seed(hash((seed, number)))
            window = torch.randint(vocab_size, (length + 1,), generator=generator)
            found, spans = ([], Spans()) if media is None else _insert(window, media, generator)
            windows.append(window)
            in_samples.append(found)
            lengths.append(_cut(length, documents, spans, generator))
            if is_weighted:
                of_document = 2 * torch.rand(documents, generator=generator)
                weights.append(of_document.repeat_interleave(lengths[-1]))
        tokens = torch.stack(windows)  # [B, S + 1]
        ids = torch.tensor(list(sample_ids))
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions, "sample_ids": ids}
        if is_weighted:
            batch["loss_weights"] = torch.stack(weights)
        if documents > 1:
            batch |= _packed(batch["labels"], torch.stack(lengths))
        if in_pairs:
            batch[SEQUENCES] = _in_pairs(torch.stack(lengths))
        if of_rollouts:
            batch |= _rolled_out(torch.stack(lengths), ids, seed, vocab_size)
        return batch if media is None else {**batch, **_with_media(batch, media.processor, in_samples)}

    return read


def _insert(window: Tensor, media: Media, generator: torch.Generator) -> tuple[list[Medium], Spans]:
    """Replace tokens of a sample [S + 1] by media, without one that has no room; the media, and where they are."""
    reserved = torch.tensor(sorted(media.processor.placeholders))
    window[torch.isin(window, reserved)] = next(token for token in range(len(reserved) + 1) if token not in reserved)
    kept, room = [], len(window) - 2  # the first and the last token are text
    for medium in media.drawn(generator):
        if len(medium.tokens) + 1 <= room:
            kept.append(medium)
            room -= len(medium.tokens) + 1  # one token of text behind each
    spans, at = Spans(), 1
    for medium in kept:
        skipped = int(torch.randint(room + 1, (), generator=generator))
        room, at = room - skipped, at + skipped
        window[at : at + len(medium.tokens)] = torch.tensor(medium.tokens)
        spans.append((at, len(medium.tokens)))
        at += len(medium.tokens) + 1
    return kept, spans


def _with_media(batch: MicroBatch, processor: "Processor", media: Sequence[Sequence[Medium]]) -> MicroBatch:
    """The labels without placeholders, and the entries of streams."""
    reserved = torch.tensor(sorted(processor.placeholders))
    labels = batch["labels"].masked_fill(torch.isin(batch["labels"], reserved), IGNORED)
    return {"labels": labels, **processor.entries_of(batch["tokens"], media, batch.get("document_lengths"))}


def _cut(length: int, documents: int, spans: Spans, generator: torch.Generator) -> Tensor:
    """Random lengths [M] of at least one token each; all ways around its media are equally likely."""
    borders = torch.arange(1, length)
    within = [torch.arange(start + 1, start + number) for start, number in spans]
    borders = borders[~torch.isin(borders, torch.cat(within))] if within else borders
    borders = borders[torch.randperm(len(borders), generator=generator)[: documents - 1]].sort().values
    missing = documents - 1 - len(borders)
    lengths = torch.diff(borders, prepend=torch.tensor([0]), append=torch.tensor([length]))
    return torch.cat((lengths, lengths.new_zeros(missing)))


def _packed(labels: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """The labels [B, S], positions [B, S] and lengths [B, M] of packed samples."""
    ends = lengths.cumsum(dim=1)
    everywhere = torch.arange(labels.shape[1]).expand_as(labels).contiguous()
    within = torch.searchsorted(ends, everywhere, right=True)  # [B, S]
    return {
        "labels": labels.scatter(1, ends - 1, IGNORED),
        "positions": everywhere - (ends - lengths).gather(1, within),
        "document_lengths": lengths,
    }


def _rolled_out(lengths: Tensor, ids: Tensor, seed: int, vocab_size: int) -> dict[str, Tensor]:
    """lengths [B, M] of completions -> their numbers, normal advantages, and log-probabilities near a uniform guess."""
    documents, generator = lengths.shape[1], torch.Generator()
    numbers, advantages, sampled = [], [], []
    for number, own in zip(ids.tolist(), lengths, strict=True):
        generator.manual_seed(hash((seed, number, documents)))
        numbers.append(torch.arange(documents).repeat_interleave(own))
        advantages.append(torch.randn(documents, generator=generator).repeat_interleave(own))
        sampled.append(0.2 * torch.randn(int(own.sum()), generator=generator) - math.log(vocab_size))
    return {SEQUENCES: torch.stack(numbers), ADVANTAGES: torch.stack(advantages), SAMPLED: torch.stack(sampled)}


def _in_pairs(lengths: Tensor) -> Tensor:
    """lengths [B, M] -> the number of each position's document [B, S], -1 without a second answer."""
    paired = lengths.shape[1] // 2 * 2
    numbers = torch.arange(lengths.shape[1])
    numbers = torch.where(numbers < paired, numbers, -1)
    return torch.stack([numbers.repeat_interleave(own) for own in lengths])
