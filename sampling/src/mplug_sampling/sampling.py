"""Sampling from a model: temperature, top-k and nucleus (top-p, arXiv 1904.09751)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug.tensors.random import key_of, uniform
from mplug_sampling.drawing import drawn


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

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token, whatever is drawn."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def keeps_all(self) -> bool:
        """Whether every token may be drawn, so that their order by probability does not matter."""
        return not self.top_k and self.top_p >= 1


def sample_key(seed: int, occurrence: int = 0) -> int:
    """The key of the random numbers of a prompt: a function of the seed and of how often the prompt came before.

    So the text of a prompt does not depend on other prompts, and the same prompt gets other texts when it comes again.
    """
    return key_of(seed, "sample", occurrence) if occurrence else key_of(seed, "sample")


def draws(keys: Tensor, index: Tensor) -> Tensor:
    """The random numbers in [0, 1) with which samples with the keys [B] draw their token number `index`: fp64 [B].

    `index` is an int64 scalar on the keys' device.
    """
    return uniform(keys, index).double()


def log_probabilities(logits: Tensor, tokens: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Those of tokens [B] by logits [B, V] that temperatures [B] divide, in at least fp32."""
    values = of_all_tokens(logits, torch.tensor(temperatures, dtype=torch.float64, device=logits.device))
    return values.gather(1, tokens[:, None])[:, 0]


def of_all_tokens(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The log-probabilities [B, V] by logits [B, V] that temperatures [B] divide, in at least fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperatures.to(wide.dtype)[:, None]).log_softmax(dim=-1)


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """The tokens [B] that the random numbers `draws` [B] in [0, 1) select from logits [B, V].

    Among all tokens, in the order of the vocabulary (`drawn`); among those of top-k and top-p, from the likeliest to
    the least likely, in fp64.
    """
    logits = logits[:, : sampling.vocab_size]
    if sampling.is_greedy:
        return logits.argmax(dim=-1)
    if sampling.keeps_all:
        temperatures = torch.full((len(logits),), sampling.temperature, dtype=torch.float64, device=logits.device)
        return drawn(of_all_tokens(logits, temperatures), draws.to(logits.device))
    logits = logits.double()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[:, : sampling.top_k]
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities * (before < sampling.top_p)  # the likeliest token is always kept
    cumulated = probabilities.cumsum(dim=-1)
    index = torch.searchsorted(cumulated, draws[:, None].to(cumulated.device) * cumulated[:, -1:], right=True)
    return tokens.gather(-1, index.clamp(max=ordered.shape[-1] - 1))[:, 0]
