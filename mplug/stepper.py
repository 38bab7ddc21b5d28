"""The default step: accumulate micro batches, then update. Nothing here waits for the device."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mplug.contracts import MicroBatch, Optimizer, Piece, StepResult, StepScalars
from mplug.gradients import Sinks
from mplug.model import Model, region
from mplug.nn.random import key_of, sample_keys


def make_pieces(model: Model, sinks: Sinks) -> list[Piece]:
    """What the optimizer updates: each parameter whole, its gradient in the sink's buffer."""
    return [
        Piece(name, sink.parameter.data, sink.buffer, None, placement.parameter, placement)
        for name, sink in sinks.items()
        for placement in (model.placements[name],)
    ]


class AccumulatingStepper:
    """One micro batch after the other through all units, then one update."""

    def __init__(
        self,
        model: Model,
        sinks: Sinks,
        pieces: list[Piece],
        optimizer: Optimizer,
        *,
        rank: int,
        seed: int,
        max_norm: float,
    ) -> None:
        self.model, self.sinks, self.pieces, self.optimizer = model, sinks, pieces, optimizer
        self.seed, self.max_norm = seed, max_norm
        self.owned = owned_gradients(pieces, rank)
        self.loss_sum = self.num_targets = torch.zeros(())

    def forward_backward(self, micro_batches: Iterable[MicroBatch], step: int) -> None:
        """Sum the gradients of a step's micro batches into the sinks, and losses and token counts beside them."""
        torch.manual_seed(key_of(self.seed, "step", step))  # for kernels that draw their own numbers
        self.model.module.train()
        self.sinks.begin_step()
        losses, counts = [], []
        for batch, last in _marking_last(micro_batches):
            if last:
                self.sinks.expect_last()
            keys = sample_keys(self.seed, step, batch["sample_ids"])
            loss, num_targets = self.model.loss({**batch, "keys": keys})
            loss.backward()
            losses.append(loss.detach())
            counts.append(num_targets)
        self.sinks.finish()
        self.loss_sum, self.num_targets = torch.stack(losses).sum(), torch.stack(counts).sum()

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Finish gradients, clip, check that they are finite, and let the optimizer update its pieces."""
        norm = global_norm(self.owned) / self.num_targets
        scale = 1 / self.num_targets
        if self.max_norm > 0:
            scale = scale * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        loss = self.loss_sum / self.num_targets
        skip = (~(norm.isfinite() & loss.isfinite())).float()
        self.optimizer.step(StepScalars(torch.full_like(norm, lr), scale.float(), skip, weight_decay))
        return StepResult(loss, norm, self.num_targets, skip)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """The mean loss over all tokens of the micro batches, without gradients or dropout."""
        self.model.module.eval()
        sums = [self.model.loss({**batch, "keys": batch["sample_ids"]}) for batch in micro_batches]
        losses, counts = zip(*sums, strict=True)
        return torch.stack(losses).sum() / torch.stack(counts).sum()


def owned_gradients(pieces: Iterable[Piece], rank: int) -> list[Tensor]:
    """Views of the gradients so that over all ranks every element appears once: on the first that holds a copy."""
    return [
        region(piece.gradient, box)
        for piece in pieces
        for box in piece.placement.boxes(rank)
        if min(box.copies) == rank
    ]


def global_norm(owned: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(owned)))
    return norm


def _marking_last(micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    iterator = iter(micro_batches)
    held = next(iterator)
    for following in iterator:
        yield held, False
        held = following
    yield held, True
