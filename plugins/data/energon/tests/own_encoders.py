"""Task encoders as a user writes them, some of which do not do. Every sample has 32 places."""

from typing import Any

import torch
from megatron.energon import DefaultTaskEncoder, Sample, stateless
from megatron.energon.edataclass import edataclass
from torch import Tensor

S = 32


class Counting(DefaultTaskEncoder):
    vocab_size = S + 1

    def __init__(self, seq_length: int, first: int) -> None:
        super().__init__()
        self.range = torch.arange(first, first + seq_length + 1)

    @stateless
    def encode_sample(self, sample: Sample) -> dict[str, Tensor]:
        first = self.range[:-1]
        return {"tokens": first, "labels": self.range[1:], "positions": first, "extra": first[:2]}


@edataclass
class Document(Sample):
    number: int

    @property
    def length(self) -> int:
        return 3 + self.number % 2


@edataclass
class Packed(Sample):
    tokens: Tensor
    labels: Tensor
    document_lengths: Tensor


class Packing(DefaultTaskEncoder):
    """Of each sample a document, its number three or four times; as many in a row as fit, and what fills it up."""

    @stateless
    def encode_sample(self, sample: Any) -> Document:
        return Document.derive_from(sample, number=int(sample.text.split()[1].strip(":")))

    def select_samples_to_pack(self, samples: list[Document]) -> list[list[Document]]:
        rows: list[list[Document]] = [[]]
        for sample in samples:
            if sum(one.length for one in rows[-1]) + sample.length >= S:
                rows.append([])
            rows[-1].append(sample)
        return rows

    @stateless
    def pack_selected_samples(self, samples: list[Document]) -> Packed:
        lengths = [sample.length for sample in samples]
        rest = S - sum(lengths)
        tokens = torch.tensor([sample.number for sample in samples] + [99]).repeat_interleave(
            torch.tensor([*lengths, rest])
        )
        labels = torch.cat([tokens[1:], tokens[:1]])
        labels[torch.tensor(lengths).cumsum(0) - 1] = -100
        labels[S - rest :] = -100
        spread = torch.zeros(12, dtype=torch.int64)
        spread[: len(lengths) + 1] = torch.tensor([*lengths, rest])
        return Packed.derive_from(samples[0], tokens=tokens, labels=labels, document_lengths=spread)


class Short(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: Sample) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(S - 1), "labels": torch.zeros(S)}


class Silent(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: Sample) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(S)}


class Broken(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: Sample) -> dict[str, float]:
        return {"tokens": 1 / 0}


class Seeing(DefaultTaskEncoder):
    """Of each sample a picture of its own size, then its text; or, as it should not be, the tokens of another one."""

    def __init__(self, seq_length: int, processor: Any, wrong: str = "") -> None:
        super().__init__()
        self.seq_length, self.processor, self.wrong = seq_length, processor, wrong

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        width = 8 * (1 + len(sample.text) % 2)
        medium = self.processor.prepare(torch.zeros(1, 8, width, 3, dtype=torch.uint8))
        tokens = torch.tensor([*medium.tokens, *sample.text.encode(), *[0] * self.seq_length])[: self.seq_length]
        sample = {"tokens": tokens, "labels": torch.full_like(tokens, -100), "media": (medium,)}
        return {name: value for name, value in sample.items() if name != self.wrong} | (
            {"media": ()} if self.wrong == "tokens of no picture" else {}
        )


class Other:
    pass
