"""Objectives with a small head of their own: a reward, or the classes of texts. B batch, S sequence, D embed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Init, Parameter, Shift
from mplug_nn.linear import Linear
from mplug_nn.objective import Objective


class ScoredObjective(Objective):
    """The base class of objectives that compute C scores of each hidden vector, in place of those of a vocabulary.

    A subclass implements `forward` and calls `scores`. `labels` are the names of the C scores. The weight has the name
    `score.weight` [C, D] and no bias, as the heads of published classifiers of decoders. It begins with normal values
    of the standard deviation `init_std`.
    """

    projects: ClassVar[bool] = False
    of_tokens: ClassVar[bool] = False
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        dim: int,
        labels: Sequence[str],
        init_std: float,
        entries: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        figures: Sequence[str] = (),
        shifted: Mapping[str, Shift] = MappingProxyType({}),
    ) -> None:
        super().__init__(entries, figures, shifted=shifted)
        self.labels = tuple(labels)
        self.score = Linear(dim, len(self.labels), bias=False)
        self.score.adaptable = False
        self.init_std = init_std

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the scores' weight, which no strategy divides by rows, and of the figures."""
        weight = Parameter(("scores", "embed"), Init("normal", std=self.init_std))
        return {**super().plan_entries(inits), "score.weight": weight}

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [B, S / R, D] -> the scores [B, S, C] of all positions of this process, in at least fp32."""
        found = self.score(hidden)
        return self.gathered(found.to(torch.promote_types(found.dtype, torch.float32)))
