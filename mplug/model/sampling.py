"""Sampling from a model: temperature, top-k and nucleus (top-p, arXiv 1904.09751)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug.model.model import Model
from mplug.nn.random import key_of, uniform


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 takes the likeliest token; `top_k` 0 and `top_p` 1 keep all tokens.

    Only tokens below `vocab_size` are drawn, because a model may have more tokens than its tokenizer; None means all
    tokens of the model.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int | None = None


@torch.no_grad()
def sample(model: Model, prompt: list[int], num_tokens: int, context: int, sampling: Sampling) -> Iterator[int]:
    """Yield `num_tokens` tokens after a prompt, each from a window of the last `context` tokens.

    The random number of a token is a function of the seed and the token's index, so equal seeds give equal text.
    """
    device = next(iter(model.parameters().values())).device
    model.module.eval()
    tokens, zero = list(prompt), torch.zeros(1, dtype=torch.int64, device=device)
    for index in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        logits = model.logits({"tokens": window, "positions": positions, "sample_ids": zero, "keys": zero})[0, -1]
        draw = uniform(key_of(sampling.seed, "sample"), torch.tensor(index)).double()
        token = choose(logits.double().cpu(), sampling, draw)
        tokens.append(token)
        yield token


def choose(logits: Tensor, sampling: Sampling, draw: Tensor) -> int:
    """The token that the random number `draw` in [0, 1) selects from logits [V]."""
    logits = logits[: sampling.vocab_size]
    if sampling.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = ((logits - logits.max()) / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    probabilities = probabilities * (before < sampling.top_p)  # the likeliest token is always kept
    cumulated = probabilities.cumsum(dim=0)
    index = int(torch.searchsorted(cumulated, draw * cumulated[-1], right=True))
    return int(tokens[min(index, len(ordered) - 1)])
