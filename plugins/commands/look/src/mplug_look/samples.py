"""Samples of a loader as plain data: pieces of text, targets, documents and media. B samples, S sequence length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from mplug import DOCUMENTS, IGNORED, MicroBatch, UsageError

if TYPE_CHECKING:
    from mplug import Run
    from mplug_streams import Processor, Seen

LONGEST = 4
"""Maximum number of tokens of one character: the bytes of a character in UTF-8."""
REPLACEMENT = "\ufffd"
"""The character that stands for bytes that are no whole character."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are shown together; usually one.

    `text` is None if the tokenizer has none for them. `is_target`: the model learns to predict them. `label` is the
    target at the position before, if it is another token. `medium` is the number of the medium in their place.
    """

    start: int
    tokens: tuple[int, ...]
    text: str | None
    is_target: bool
    label: int | None = None
    medium: int | None = None
    begins_document: bool = False


@dataclass(frozen=True)
class Sample:
    """A sample: its number in the global order, its pieces, and its media as frames [F, H, W, 3] of uint8."""

    number: int
    length: int
    targets: int
    pieces: tuple[Piece, ...]
    media: tuple[Tensor, ...]


def read_samples(
    run: "Run", split: Literal["train", "validation"], skip: int, number: int, tokenizer: Any
) -> tuple[list[Sample], dict[str, str]]:
    """The samples behind the first `skip` of the first rank, and a description of each entry of their micro batch."""
    loader = run.hooks.call.build_loader(run=run, split=split)
    _, shards = run.mesh.batch_shard(run.rank)
    found, entries = list[Sample](), dict[str, str]()
    unread = skip
    for batch in loader.take((skip + number) * shards):
        size = len(batch["tokens"])
        if unread < size:
            entries = entries or {name: f"{tuple(value.shape)} {value.dtype}" for name, value in batch.items()}
            found += samples_of(batch, _processor_of(run), tokenizer)[unread:]
        unread = max(unread - size, 0)
    return found[:number], entries


def _processor_of(run: "Run") -> "Processor | None":
    """The processor of the model, if the loader supplies its entries."""
    made: Processor | None = run.hooks.call.build_processor(config=run.config)
    return made if made is not None and run.entries.issuperset(made.entries) else None


def samples_of(batch: MicroBatch, processor: "Processor | None", tokenizer: Any) -> list[Sample]:
    """The samples of a micro batch."""
    decode, names = _decoding(tokenizer)
    restore = getattr(processor, "contents_of", None)
    media: Sequence[Sequence[Seen]] = [[] for _ in batch["tokens"]] if restore is None else restore(batch)
    found = []
    for row, (tokens, labels, own) in enumerate(
        zip(batch["tokens"].tolist(), batch["labels"].tolist(), media, strict=True)
    ):
        if any(position >= len(tokens) for one in own for position in one.positions):
            raise UsageError(f"the processor has a medium beyond the tokens of sample {row}")
        in_place = {position: number for number, one in enumerate(own) for position in one.positions}
        starts = _starts(batch[DOCUMENTS][row].tolist()) if DOCUMENTS in batch else set[int]()
        pieces = tuple(_pieces(tokens, labels, in_place, starts, decode, names))
        number, targets = int(batch["sample_ids"][row]), sum(label != IGNORED for label in labels)
        found.append(Sample(number, len(tokens), targets, pieces, tuple(one.content for one in own)))
    return found


def _starts(lengths: Sequence[int]) -> set[int]:
    return {sum(lengths[:number]) for number, length in enumerate(lengths) if length}


def _decoding(tokenizer: Any) -> tuple[Decode, Mapping[int, str]]:
    """How tokens become text, and the texts of special tokens."""
    names = {number: text for text, number in getattr(tokenizer, "special_tokens", {}).items()}
    limit = getattr(tokenizer, "vocab_size", None)

    def decode(tokens: Sequence[int]) -> str:
        is_known = tokenizer is not None and all(limit is None or token < limit for token in tokens)
        return tokenizer.decode(tokens) if is_known else ""

    return decode, names


def _pieces(
    tokens: Sequence[int],
    labels: Sequence[int],
    in_place: Mapping[int, int],
    starts: set[int],
    decode: Decode,
    names: Mapping[int, str],
) -> Iterator[Piece]:
    """The pieces of a sample, and a last one if the label of its last position is a target."""
    targets = [IGNORED, *labels]  # of each position: what the position before predicts
    shown = [*tokens, labels[-1]] if labels and labels[-1] != IGNORED else list(tokens)
    before, start = list[int](), 0
    while start < len(shown):
        end = _end_of_run(shown, targets, in_place, starts, start)
        medium, target = in_place.get(start), targets[start]
        text: str | None = None
        if medium is None and end == start + 1:
            end, text = _whole_character(shown, targets, in_place, starts, start, before, decode)
        run = tuple(shown[start:end])
        label = None if target in (IGNORED, shown[start]) else target
        name = text or names.get(run[0])
        yield Piece(start, run, name, target != IGNORED, label, medium, start in starts)
        before, start = (list(run) if text else before), end


def _end_of_run(
    shown: Sequence[int], targets: Sequence[int], in_place: Mapping[int, int], starts: set[int], start: int
) -> int:
    """The end of the placeholders of a medium, or of at least LONGEST equal tokens without targets."""
    end, medium = start + 1, in_place.get(start)
    while end < len(shown) and end not in starts and in_place.get(end) == medium:
        if medium is None and (shown[end] != shown[start] or targets[end] != IGNORED or targets[start] != IGNORED):
            break
        end += 1
    return end if medium is not None or end - start >= LONGEST else start + 1


def _whole_character(
    shown: Sequence[int],
    targets: Sequence[int],
    in_place: Mapping[int, int],
    starts: set[int],
    start: int,
    before: Sequence[int],
    decode: Decode,
) -> tuple[int, str]:
    """The end of the tokens of a character, and their text; the token's own end if they do not belong together.

    The text of tokens is decoded behind that of the tokens `before`: some tokenizers omit a space at the beginning of a
    text.
    """

    def behind(end: int) -> str:
        prefix, whole = decode(before), decode([*before, *shown[start:end]])
        return whole.removeprefix(prefix) if prefix and whole.startswith(prefix) else decode(shown[start:end])

    first = behind(start + 1)
    for end in range(start + 1, min(start + LONGEST, len(shown)) + 1):
        other = end - 1
        is_together = (targets[other] == IGNORED) == (targets[start] == IGNORED) and other not in in_place
        if end > start + 1 and (not is_together or other in starts):
            break
        if REPLACEMENT not in (text := behind(end)):
            return end, text
    return start + 1, first
