"""The log-probabilities that a model gives to the ends of texts, on the ranks of a layout.

B texts of a batch, b of them on this rank, S positions, V vocabulary, N positions that predict something.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mplug.commands import run_units
from mplug_sampling.decoding import Alone
from mplug_sampling.sampler import Sampler

PADDING = 0
"""The token behind a text that is shorter than others of its batch: no position before it sees it."""


class Score(NamedTuple):
    """The sum of the log-probabilities of the last tokens of a text, and whether each of them is the most probable."""

    log_probability: float
    is_greedy: bool


@torch.no_grad()
def score(
    sampler: Sampler, texts: Sequence[Sequence[int]], numbers: Sequence[int], batch_size: int, ranks: Alone
) -> list[Score]:
    """The scores of the last `numbers` tokens of texts, each given the tokens before it. Collective.

    A text has at least one token more than are scored. Texts of about equal length are computed together, with padding
    behind the shorter ones. If samples of the model influence each other, each text is computed alone.
    """
    for text, number in zip(texts, numbers, strict=True):
        if not 0 < number < len(text):
            raise ValueError(f"a text of {len(text)} tokens has no {number} last tokens with one before them")
    sampler.model.module.eval()
    order = sorted(range(len(texts)), key=lambda one: -len(texts[one]))
    size, found = 1 if sampler.uncached else batch_size, dict[int, Score]()
    for begin in range(0, len(order), size):
        batch = order[begin : begin + size]
        scores = _of_batch(sampler, [texts[one] for one in batch], [numbers[one] for one in batch], ranks)
        found |= zip(batch, scores, strict=True)
    return [found[one] for one in range(len(texts))]


def _of_batch(sampler: Sampler, texts: Sequence[Sequence[int]], numbers: Sequence[int], ranks: Alone) -> list[Score]:
    """The scores of a batch; the texts are repeated until the ranks that divide the batch get equally many."""
    model = sampler.model
    device = next(iter(model.parameters().values())).device
    each = -(-len(texts) // ranks.shards)
    own = [number % len(texts) for number in range(ranks.shard * each, (ranks.shard + 1) * each)]
    length = max(len(text) for text in texts) - 1
    length = -(-length // ranks.multiple) * ranks.multiple
    tokens = torch.full((each, length), PADDING)
    for row, number in zip(tokens, own, strict=True):
        row[: len(texts[number]) - 1] = torch.tensor(texts[number][:-1])
    zeros = torch.zeros(each, dtype=torch.int64)
    entries = {"tokens": tokens, "positions": torch.arange(length)[None], "sample_ids": zeros, "keys": zeros}
    entries = {name: entry.to(device) for name, entry in entries.items()}
    places = [(row, len(texts[one]) - 1 - numbers[one], len(texts[one]) - 1) for row, one in enumerate(own)]
    targets = torch.tensor([token for one in own for token in texts[one][-numbers[one] :]], device=device)
    finish = partial(_scores, places, targets, ranks)
    result = torch.empty(each, 2, dtype=torch.float64, device=device)
    scores = ranks.run_units(model, entries, partial(run_units, model.module), finish, result)
    scores = ranks.tokens_of_all(scores)[: len(texts)]
    return [Score(total, greedy == 1.0) for total, greedy in scores.tolist()]


def _scores(places: Sequence[tuple[int, int, int]], targets: Tensor, ranks: Alone, logits: Tensor) -> Tensor:
    """The scores [b, 2] of this rank's texts, from its logits [b, S, V / R].

    `places` are the rows, first and last positions that predict the targets [N].
    """
    own = torch.cat([logits[row, first:last] for row, first, last in places])  # [N, V / R]
    whole = ranks.whole_vocabulary(own)  # [N, V]
    wide = whole.to(torch.promote_types(whole.dtype, torch.float32)).log_softmax(dim=-1)
    of_targets = wide.gather(1, targets[:, None])[:, 0].double()
    greedy = wide.argmax(dim=-1) == targets
    counts = [last - first for _, first, last in places]
    parts = zip(of_targets.split(counts), greedy.split(counts), strict=True)
    return torch.stack([torch.stack((part.sum(), right.all().double())) for part, right in parts])
