"""What the texts in lanes draw their tokens with: numbers, temperatures and what else a `Sampling` says.

B lanes, n texts that begin, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mplug_sampling.drawing import drawn
from mplug_sampling.sampling import Sampling, choose, draws, log_probabilities, of_all_tokens
from mplug_sampling.transfers import sent


class Start(NamedTuple):
    """A text that begins in a lane: as the arguments of `Lanes.begin`."""

    lane: int
    prompt: Sequence[int]
    key: int
    sampling: Sampling
    num_taken: int = 0


class LaneDraws:
    """The draws of B lanes, in tensors that keep their addresses, so that a graph can replay those of a step."""

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self.device = device
        self.samplings: list[Sampling | None] = [None] * num_lanes
        """That of each lane's text; None: the lane has none."""
        self.limit: int | None = None
        """Tokens from this number on are not drawn (`Sampling.vocab_size`): a constant of a recording."""
        self._keys, self._index = (torch.zeros(num_lanes, dtype=torch.int64, device=device) for _ in range(2))
        self._temperatures = torch.ones(num_lanes, dtype=torch.float64, device=device)
        self._is_greedy = torch.zeros(num_lanes, dtype=torch.bool, device=device)

    def begin(self, starts: Sequence[Start], lanes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(the first tokens [n] of texts behind logits [n, V], their log-probabilities); `lanes` [n] are theirs."""
        samplings = [replace(one.sampling, seed=0) for one in starts]
        for one, sampling in zip(starts, samplings, strict=True):
            self.samplings[one.lane] = sampling
        keys, index = (sent([one[of] for one in starts], torch.int64, self.device) for of in (2, 4))
        temperatures = sent([one.temperature or 1.0 for one in samplings], torch.float64, self.device)
        is_greedy = sent([one.is_greedy for one in samplings], torch.bool, self.device)
        self._keys[lanes], self._index[lanes] = keys, index + 1
        self._temperatures[lanes], self._is_greedy[lanes] = temperatures, is_greedy
        numbers = draws(keys, index)
        tokens, scores = self._among_all(logits, temperatures, is_greedy, numbers)
        self._among_some(samplings, logits, numbers, tokens, scores)
        return tokens, scores

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(the next tokens [B] behind logits [B, V], their log-probabilities), among all tokens or the likeliest ones.

        No work depends on values of the CPU; `finish` draws for the other texts.
        """
        numbers = draws(self._keys, self._index)
        self._index.add_(1)
        return self._among_all(logits, self._temperatures, self._is_greedy, numbers)

    def finish(self, logits: Tensor, tokens: Tensor, scores: Tensor) -> None:
        """Write tokens and log-probabilities of texts with top-k, top-p or another limit over those of `advance`."""
        if any(one is not None and self._is_other(one) for one in self.samplings):
            self._among_some(self.samplings, logits, draws(self._keys, self._index - 1), tokens, scores)

    def _is_other(self, sampling: Sampling) -> bool:
        return sampling.vocab_size != self.limit or not (sampling.is_greedy or sampling.keeps_all)

    def _among_all(
        self, logits: Tensor, temperatures: Tensor, is_greedy: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        values = of_all_tokens(logits, temperatures)
        likeliest = logits[:, : self.limit].argmax(dim=-1)
        tokens = torch.where(is_greedy, likeliest, drawn(values[:, : self.limit], numbers))
        return tokens, values.gather(1, tokens[:, None])[:, 0]

    def _among_some(
        self, samplings: Sequence[Sampling | None], logits: Tensor, numbers: Tensor, tokens: Tensor, scores: Tensor
    ) -> None:
        others: dict[Sampling, list[int]] = {}
        for row, one in enumerate(samplings):
            if one is not None and self._is_other(one):
                others.setdefault(one, []).append(row)
        for sampling, own in others.items():
            rows = sent(own, torch.int64, self.device)
            chosen = choose(logits[rows], sampling, numbers[rows])
            tokens[rows] = chosen
            scores[rows] = log_probabilities(logits[rows], chosen, [sampling.temperature or 1.0] * len(own))
