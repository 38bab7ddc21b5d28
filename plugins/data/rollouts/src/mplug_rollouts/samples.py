"""Packs completions with their prompts into samples. B samples, S sequence length, K completions of a sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mplug import ADVANTAGES, DOCUMENTS, IGNORED, SAMPLED, SEQUENCES
from mplug_rollouts.groups import Item


def batch_of(
    samples: Sequence[Sequence[Item]], first: int, length: int, filler: int, *, masks_truncated: bool, has_scores: bool
) -> dict[str, Tensor]:
    """The micro batch of samples, each of K completions, with numbers from `first` on.

    Each completion and its prompt are a document. The unfilled end of a sample is one more document, without targets.
    """
    shape = (len(samples), length)
    tokens, labels = torch.full(shape, filler), torch.full(shape, IGNORED)
    positions, sequences = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    advantages, scores = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    documents = torch.zeros(len(samples), max(map(len, samples)) + 1, dtype=torch.int64)
    for row, items in enumerate(samples):
        begin = 0
        for number, item in enumerate(items):
            inputs = [*item.prompt, *item.tokens[:-1]]
            end = begin + len(inputs)
            if end > length:
                raise ValueError(f"{len(items)} completions of a sample are longer than its {length} tokens")
            of_tokens = slice(end - len(item.tokens), end)
            tokens[row, begin:end] = torch.tensor(inputs)
            positions[row, begin:end] = torch.arange(len(inputs))
            sequences[row, begin:end] = number
            documents[row, number] = len(inputs)
            if not (masks_truncated and item.truncated):
                labels[row, of_tokens] = torch.tensor(item.tokens)
            advantages[row, of_tokens] = item.advantage
            if has_scores:
                scores[row, of_tokens] = torch.tensor(item.log_probabilities, dtype=torch.float64)
            begin = end
        documents[row, len(items)] = length - begin
        positions[row, begin:] = torch.arange(length - begin)
    found = {"tokens": tokens, "labels": labels, "positions": positions, SEQUENCES: sequences, DOCUMENTS: documents}
    found |= {ADVANTAGES: advantages, "sample_ids": torch.arange(first, first + len(samples))}
    return {**found, SAMPLED: scores} if has_scores else found
