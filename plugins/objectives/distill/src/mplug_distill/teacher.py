"""The end of a teacher that writes its largest probabilities: in place of a loss, it returns them for all positions.

B batch, S sequence of this process, R ranks of sequence parallelism, k tokens of a position.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mplug import IGNORED, TOP_TAUGHT, TOP_TOKENS, hookimpl
from mplug_nn import Objective, replace_end

if TYPE_CHECKING:
    from mplug import Model, Run

LABEL = "mplug teach"
CHUNK = 1024
"""Positions of a sample at which logits exist at a time."""
OUTERMOST = 1 << 30
"""A layer outside of those of all adapters."""


class Teacher:
    """The hook of the command: it gives the model its end."""

    layer = OUTERMOST

    def __init__(self, k: int) -> None:
        self.k = k

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end return the largest probabilities; UsageError for a model without logits of tokens."""
        replace_end(run, model, TopOfTeacher(self.k), LABEL)


class TopOfTeacher(Objective):
    """Returns the k most probable tokens of each position, and their log-probabilities. Its loss is zero."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.outputs = dict.fromkeys((TOP_TOKENS, TOP_TAUGHT), ("batch", "sequence", "top"))

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [B, S / R, D], labels [B, S] -> (0, number of targets, tokens [B, S, k], logarithms [B, S, k + 1]).

        The logarithms are those of the probabilities of these tokens, and of all others together.
        """
        ranks = labels.shape[1] // hidden.shape[1]
        parts = hidden.split(max(CHUNK // ranks, 1), dim=1)
        tokens, logs = zip(*(self.top_probabilities(part, project, self.k) for part in parts), strict=True)
        counted = (labels != IGNORED).sum()
        return hidden.new_zeros(()), counted, joined(tokens, ranks), joined(logs, ranks)


def joined(parts: tuple[Tensor, ...], ranks: int) -> Tensor:
    """Tiles [B, R n, ...] of the positions of all ranks -> [B, S, ...] in their order."""
    return torch.cat([part.unflatten(1, (ranks, -1)) for part in parts], dim=2).flatten(1, 2)
