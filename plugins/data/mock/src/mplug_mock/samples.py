"""Samples of random tokens. B samples, S sequence length, M documents of a sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from mplug import MicroBatch

IGNORED = -100
"""The label of a position without a target."""


def reader(seed: int, vocab_size: int, length: int, documents: int) -> Callable[[range], MicroBatch]:
    """A function that makes samples of `length` tokens by their numbers, each with this number of documents.

    In a packed sample, positions restart at 0 in every document, and a document's last token has no target.
    """
    positions = torch.arange(length)[None]

    def read(sample_ids: range) -> MicroBatch:
        windows, lengths = [], []
        generator = torch.Generator()
        for number in sample_ids:
            generator.manual_seed(hash((seed, number)))
            windows.append(torch.randint(vocab_size, (length + 1,), generator=generator))
            lengths.append(_cut(length, documents, generator))
        tokens = torch.stack(windows)  # [B, S + 1]
        ids = torch.tensor(list(sample_ids))
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions, "sample_ids": ids}
        return {**batch, **_packed(batch["labels"], torch.stack(lengths))} if documents > 1 else batch

    return read


def _cut(length: int, documents: int, generator: torch.Generator) -> Tensor:
    """Random lengths [M] of at least one token each; all ways to split a sample are equally likely."""
    borders = torch.randperm(length - 1, generator=generator)[: documents - 1].sort().values + 1
    return torch.diff(borders, prepend=torch.tensor([0]), append=torch.tensor([length]))


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
