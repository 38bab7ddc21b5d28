"""The end of a language model. B batch, S sequence, D embed, V vocabulary."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import Step
from mplug_nn.linear import Linear
from mplug_nn.loss import Loss
from mplug_nn.norm import Norm


class Head(nn.Module):
    """The last norm, the projection to the vocabulary, the loss.

    With `soft_cap` c, logits become c tanh(logits / c) (Gemma 2, arXiv 2408.00118). Before that, they are multiplied by
    `scale` (Granite): the projection receives multiplied vectors, so suppliers of the loss need not know it.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, norm: Norm, hidden_size: int, vocab_size: int, soft_cap: float | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.norm, self.soft_cap, self.scale = norm, soft_cap, scale
        self.project = Linear(hidden_size, vocab_size, bias=False)
        self.project.adaptable = False  # suppliers of the loss multiply by the weight
        self.loss = Loss(soft_cap)
        self.projects = True

    def plan_work(self) -> Step:
        """The steps; an objective with a head of its own may leave out the projection."""
        steps = {"norm": True, "project": self.projects, "loss": self.loss is not None}
        return tuple(name for name, is_there in steps.items() if is_there)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the projection."""
        vocab = Segment("vocab", self.project.weight.shape[0], uneven="pad")
        return {"project.weight": Parameter((vocab, "embed"), inits.weight)}

    def forward(
        self, x: Tensor, labels: Tensor, loss_weights: Tensor | None = None, **entries: Tensor
    ) -> tuple[Tensor, ...]:
        """x [B, S, D], labels and weights of their losses [B, S] -> (sum of the losses in nats, number of targets).

        `entries` are those of an objective (`mplug_nn.Objective`), whose further results follow.
        """
        return self.loss_of(self.norm(x)[0], labels, loss_weights, **entries)

    def forward_beside(
        self, x: Tensor, beside: Tensor, labels: Tensor, loss_weights: Tensor | None = None, **entries: Tensor
    ) -> tuple[Tensor, ...]:
        """As `forward`, for an objective that also takes the vectors of a second model (`add_frozen_model`)."""
        return self.loss_of(self.norm(x)[0], labels, loss_weights, beside=beside, **entries)

    def vectors(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """x [B, S, D] -> (what is projected [B, S, D], the projection to logits)."""
        return self._scaled(self.norm(x)[0]), self.project if self.soft_cap is None else self._capped

    def loss_of(
        self, h: Tensor, labels: Tensor, weights: Tensor | None = None, **entries: Tensor
    ) -> tuple[Tensor, ...]:
        """The normalised h [B, S, D], labels and weights [B, S] -> (sum of the losses in nats, number of targets)."""
        project = self.project if self.soft_cap is None else self._capped
        loss: tuple[Tensor, ...] = self.loss(self._scaled(h), project, labels, weights, **entries)
        return loss

    def logits(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, V]."""
        h = self._scaled(self.norm(x)[0])
        logits: Tensor = self.project(h) if self.soft_cap is None else self._capped(h)
        return logits

    def _scaled(self, h: Tensor) -> Tensor:
        return h if self.scale == 1.0 else h * self.scale

    def _capped(self, h: Tensor) -> Tensor:
        """h [..., D] -> capped logits [..., V]."""
        assert self.soft_cap is not None
        logits: Tensor = self.soft_cap * torch.tanh(self.project(h) / self.soft_cap)
        return logits
