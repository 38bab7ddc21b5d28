"""The most probable tokens of each position, also of a divided vocabulary.

N tokens, v the size of this process's part of the vocabulary (all of it, or a range of it).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mplug.model.slots.declaration import Slot
from mplug_nn.loss import CAPPED, Merge, _whole
from mplug_nn.top_divergence import log_of_others


def top_probabilities(hidden: Tensor, project: Callable[[Tensor], Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The default of the slot `Loss.top_probabilities`, which has no gradient.

    hidden [B, S, D], `project` to logits [B, S, V] -> (the k most probable tokens of each position, the most probable
    one first [B, S, k], int64; the logarithms of their probabilities and of that of all other tokens together
    [B, S, k + 1], in at least fp32). The last is minus infinity if there are no others (k = V). Of equally probable
    tokens, any may be returned.
    """
    logits = project(hidden)
    found = token_top_probabilities(logits.flatten(0, -2), k)
    return found[0].unflatten(0, logits.shape[:-1]), found[1].unflatten(0, logits.shape[:-1])


TOP_PROBABILITIES = Slot("Loss.top_probabilities", "loss", top_probabilities, serves=frozenset({CAPPED}))


class Parts(NamedTuple):
    """How ranks that divide a vocabulary find its largest logits together.

    `gather` maps values [N, n] of each rank to those of all ranks [N, R n], `merge` combines sums and maxima, and
    `first` is the token of this rank's first logit.
    """

    gather: Callable[[Tensor], Tensor]
    merge: Merge
    first: int


ALONE = Parts(lambda values: values, _whole, 0)


@torch.no_grad()
def token_top_probabilities(logits: Tensor, k: int, parts: Parts = ALONE) -> tuple[Tensor, Tensor]:
    """logits [N, v] -> (tokens [N, k], log-probabilities [N, k + 1]), as `top_probabilities`.

    Of the vocabulary's R parts, each contributes its k largest logits. Padding has logits of minus infinity.
    """
    own, columns = logits.topk(min(k, logits.shape[1]), dim=-1)
    values, places = parts.gather(own).topk(k, dim=-1)
    tokens = parts.gather(columns + parts.first).gather(1, places)
    local = tokens - parts.first
    outside = (local < 0) | (local >= logits.shape[1])
    others = log_of_others(logits, local.masked_fill(outside, -1), parts.merge)
    logs = torch.cat((values.to(others.dtype), others[:, None]), dim=1)
    return tokens, logs - logs.logsumexp(dim=-1, keepdim=True)
