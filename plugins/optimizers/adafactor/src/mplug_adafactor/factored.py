"""Adafactor's update (algorithms 2 and 5 of arXiv 1804.04235). O rows, I columns, E matrices of a stack."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Optimizer, Piece, ShapedState, StepScalars, updated_on
from mplug_matrices import Block

if TYPE_CHECKING:
    from mplug import Assembler, Placement
    from mplug_adafactor.config import AdafactorConfig

STACKS = ("expert", "every_expert")
"""Named axes along which separate matrices, or separate vectors (biases of experts), are stacked."""


def num_dims(placement: "Placement") -> int:
    """The dimensions of one matrix (2), vector (1) or scalar (0) of a parameter; earlier ones are stacked."""
    of_one = [dim for dim in placement.parameter.dims if dim not in STACKS]
    return min(2, len(of_one))


class FactoredMoments(Optimizer):
    """Every segment of a fused weight, and every matrix of a stack, is an update of its own.

    All ranks that hold a part of a matrix keep its whole means of rows [E, O] and columns [E, I]. The second moment of
    a vector has its shape. Gradients are scratch memory.
    """

    def __init__(self, pieces: list[Piece], assembler: "Assembler", config: "AdafactorConfig") -> None:
        self._config, self._pieces, self._rank = config, pieces, assembler.run.rank
        self._sums = assembler.sums(num_dims)
        self._masters = {piece.name: piece.master for piece in pieces}
        self._gradients = {piece.name: piece.gradient for piece in pieces}
        self._steps = torch.zeros(len(pieces), device=updated_on(pieces, assembler.run.device))
        self._states: dict[str, dict[str, Tensor | ShapedState]] = {}
        self._rows: dict[Block, Tensor] = {}  # [..., O, 1] of each matrix that this rank holds a part of
        self._columns: dict[Block, Tensor] = {}  # [..., 1, I]
        self._squares: dict[str, Tensor] = {}
        for piece, step in zip(pieces, self._steps.unbind(), strict=True):
            state: dict[str, Tensor | ShapedState] = {"step": step}
            if num_dims(piece.placement) == 2:
                state |= self._factors(piece)
            else:
                state["exp_avg_sq"] = self._squares[piece.name] = torch.zeros_like(piece.master)
            if config.beta1 is not None:
                state["exp_avg"] = torch.zeros_like(piece.master)
            self._states[piece.name] = state

    def _factors(self, piece: Piece) -> dict[str, ShapedState]:
        """The means of rows and columns of a piece's matrices; those of a fused weight are numbered."""
        found, shape = dict[str, ShapedState](), piece.placement.shape
        blocks = dict.fromkeys(part.block for part in self._sums.parts.get(piece.name, ()))
        stack, is_fused = len(shape) - 2, len(self._sums.blocks[piece.name]) > 1
        for block in blocks:
            columns = piece.master.new_zeros(*block.shape[:stack], 1, block.shape[-1])
            rows = piece.master.new_zeros(*block.shape[:-1], 1)
            self._rows[block], self._columns[block] = rows, columns
            writes, suffix = self._sums.writers[block] == self._rank, f".{block.segment}" if is_fused else ""
            start, lead = (*block.start[:stack], 0), shape[:stack]
            whole_rows, whole_columns = (*lead, block.shape[-2]), (*lead, block.shape[-1])
            found[f"exp_avg_sq_row{suffix}"] = ShapedState(whole_rows, {start: rows.squeeze(-1)}, writes)
            found[f"exp_avg_sq_col{suffix}"] = ShapedState(whole_columns, {start: columns.squeeze(-2)}, writes)
        return found

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        config, skipped = self._config, scalars.skip > 0
        kept = 1 - self._count(skipped).double().pow(-config.decay_rate)  # beta2 of each piece [P]
        kept_of = dict(zip(self._masters, kept.masked_fill(skipped, 1.0).unbind(), strict=True))
        for gradient in self._gradients.values():
            gradient.mul_(scalars.scale).masked_fill_(skipped, 0.0)
        self._advance(kept_of)
        lr, scales = scalars.lr.masked_fill(skipped, 0.0), self._scales()
        self._divide()
        norms = self._sums.of(self._gradients, lambda block: [_all(block)], torch.square)
        for part in self._sums:
            (squares,) = norms[part.block]
            factor = (squares / _numel(part.block)).sqrt_().div_(config.clip).clamp_(min=1.0).reciprocal_()
            factor = factor * lr if scales is None else factor * lr * scales[part.block]
            update = part.of(self._gradients[part.block.name])
            update.mul_(part.within(factor).to(update.device, update.dtype))
        self._apply(scalars, lr, skipped)

    def _count(self, skipped: Tensor) -> Tensor:
        """The number of each piece's update [P], at least 1."""
        self._steps.add_((~skipped).to(self._steps.dtype))
        return self._steps.clamp(min=1.0)

    def _advance(self, kept: dict[str, Tensor]) -> None:
        """Advance the second moments by the mean squares of gradients, which several ranks share."""
        eps = self._config.eps
        totals = self._sums.of(
            self._gradients, lambda block: [(-1,), (-2,)] if block.num_dims == 2 else [], torch.square
        )
        for block, rows in self._rows.items():
            beta, (by_row, by_column), columns = kept[block.name], totals[block], self._columns[block]
            _average(rows, by_row / block.shape[-1] + eps, beta)
            _average(columns, by_column / block.shape[-2] + eps, beta)
        for name, squares in self._squares.items():
            _average(squares, self._gradients[name].square().add_(eps), kept[name])

    def _scales(self) -> dict[Block, Tensor] | None:
        """The root mean square of the weights of each matrix, not below the least; None if the rate is absolute."""
        if not self._config.scale_parameter:
            return None
        totals = self._sums.of(self._masters, lambda block: [_all(block)], torch.square)
        return {
            block: (squares / _numel(block)).sqrt_().clamp_(min=self._config.least_scale)
            for block, (squares,) in totals.items()
        }

    def _divide(self) -> None:
        """Divide gradients by the roots of their second moments: of a matrix, the product of its factors."""
        eps = self._config.eps  # the least value of a mean; before the first update they are zero
        inverse = {}
        for block, held in self._rows.items():
            rows = held.clamp(min=eps)
            by_column = self._columns[block].clamp(min=eps).rsqrt_()
            inverse[block] = (rows / rows.mean(-2, keepdim=True)).rsqrt_(), by_column
        for part in self._sums:
            if part.block in inverse:
                by_row, by_column = inverse[part.block]
                gradient = part.of(self._gradients[part.block.name])
                gradient.mul_(part.within(by_row)).mul_(part.within(by_column))
        for name, squares in self._squares.items():
            self._gradients[name].mul_(squares.clamp(min=eps).rsqrt_())

    def _apply(self, scalars: StepScalars, lr: Tensor, skipped: Tensor) -> None:
        """Decay, and subtract the updates, or their running means if there is a first moment."""
        decay = 1 - lr.double() * scalars.weight_decay.masked_fill(skipped, 0.0).double()
        beta1 = self._config.beta1
        for piece in self._pieces:
            update = piece.gradient
            if beta1 is not None:
                mean = self._states[piece.name]["exp_avg"]
                assert isinstance(mean, Tensor)
                mean.lerp_(update, mean.new_full((), 1 - beta1).masked_fill(skipped, 0.0))
                update = torch.where(skipped, torch.zeros_like(mean), mean)
            if piece.parameter.decays:
                piece.master.mul_(decay.to(piece.master.dtype))
            piece.master.sub_(update)

    def state(self, piece: Piece) -> dict[str, Tensor | ShapedState]:
        """The live state of a piece, under the names of the transformers library."""
        return dict(self._states[piece.name])


def _all(block: Block) -> tuple[int, ...]:
    """The dimensions of one matrix, vector or scalar."""
    return tuple(range(-block.num_dims, 0))


def _numel(block: Block) -> int:
    """The number of elements of one matrix, vector or scalar."""
    number = 1
    for length in block.matrix_shape:
        number *= length
    return number


def _average(mean: Tensor, value: Tensor, kept: Tensor) -> None:
    """mean <- kept mean + (1 - kept) value; with `kept` 1, nothing changes."""
    mean.lerp_(value.to(mean.device, mean.dtype), (1 - kept).to(mean.device, mean.dtype))
