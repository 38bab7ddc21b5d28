"""SOAP's update (algorithm 3 of arXiv 2409.11321). O rows, I columns, E matrices of a stack.

The owner of a matrix keeps all of its state: the first moment in the coordinates of the weight, the second one in those
of the bases, the factors L [O, O] and R [I, I], and an orthonormal basis of each.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, ShapedState, StepScalars, updated_on
from mplug_matrices import Block

if TYPE_CHECKING:
    from mplug import Run
    from mplug_matrices import Matrices
    from mplug_soap.config import SOAPConfig

FIRST = 10
"""Power steps of the first refresh, which begins with the standard basis."""


@dataclass(frozen=True)
class Side:
    """One side of a matrix: its `factor` [n, n] and an orthonormal `basis` [n, n], whose columns are its vectors."""

    factor: Tensor
    basis: Tensor

    @classmethod
    def new(cls, size: int, like: Tensor) -> "Side":
        """No gradient seen, and the standard basis."""
        return cls(like.new_zeros(size, size), torch.eye(size, dtype=like.dtype, device=like.device))

    def advance(self, product: Tensor, kept: Tensor) -> None:
        """Factor <- kept factor + (1 - kept) product; with `kept` 1, nothing changes."""
        self.factor.lerp_(product, 1 - kept)

    def refresh(self, number: int, shift: float, skipped: Tensor) -> Tensor:
        """Some power steps, each followed by a QR decomposition (algorithm 4), towards the factor's eigenvectors.

        Before each decomposition, the vectors are ordered by their estimated eigenvalues, as in the authors' code: a
        vector of a small eigenvalue before one of a large eigenvalue would turn towards it by rounding alone.
        Returns the old index [n] of every vector, as if nothing were skipped.
        """
        basis, order = self.basis, torch.arange(len(self.basis), device=self.basis.device)
        added = shift * self.factor.diagonal().mean()
        for _ in range(number):
            product = torch.addmm(added * basis, self.factor, basis)
            of_step = _descending((basis * product).sum(0))
            basis, order = torch.linalg.qr(product[:, of_step])[0], order[of_step]
        self.basis.copy_(torch.where(skipped, self.basis, basis))
        return order


def _descending(estimates: Tensor) -> Tensor:
    """The order of clearly different estimates [n]; those that may differ by rounding alone keep theirs."""
    return estimates.to(torch.bfloat16).argsort(descending=True, stable=True)


@dataclass(frozen=True)
class Moments:
    """The state of one matrix; a side without a factor is None."""

    first: Tensor
    second: Tensor
    left: Side | None
    right: Side | None

    def into(self, x: Tensor) -> Tensor:
        """x [O, I] in the coordinates of the bases."""
        x = x if self.left is None else self.left.basis.mT @ x
        return x if self.right is None else x @ self.right.basis

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `into`."""
        x = x if self.left is None else self.left.basis @ x
        return x if self.right is None else x @ self.right.basis.mT


class RotatedMatrices:
    """SOAP of the pieces that are hidden matrices. Gradients are scratch memory."""

    def __init__(self, pieces: list[Piece], run: "Run", matrices: "Matrices", config: "SOAPConfig") -> None:
        self._config, self._run, self._matrices = config, run, matrices
        self._masters = {piece.name: piece.master for piece in pieces}
        self._gradients = {piece.name: piece.gradient for piece in pieces}
        self._decayed = [piece.master for piece in pieces if piece.parameter.decays]
        like = torch.empty((), dtype=matrices.dtype, device=matrices.device)
        self._steps = torch.zeros(len(pieces), device=updated_on(pieces, run.device))
        self._step_of = dict(zip(self._masters, self._steps.unbind(), strict=True))
        self._moments = {block: self._new(block, like) for block in matrices.owned}

    def _new(self, block: Block, like: Tensor) -> Moments:
        sides = [Side.new(n, like) if n <= self._config.largest_factor else None for n in block.matrix_shape]
        first, second = (like.new_zeros(block.matrix_shape) for _ in range(2))
        return Moments(first, second, *sides)

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; the first step of a run only finds the bases."""
        skipped, is_first = scalars.skip > 0, self._run.step == 1
        for gradient in self._gradients.values():
            gradient.mul_(scalars.scale).masked_fill_(skipped, 0.0)
        if not is_first:
            self._steps.add_((~skipped).to(self._steps.dtype))

        def directions(blocks: Sequence[Block], x: Tensor) -> Tensor:
            here = skipped.to(x.device)
            return torch.stack([self._direction(b, g, here, is_first) for b, g in zip(blocks, x.unbind(), strict=True)])

        if self._decayed:
            factor = (1 - scalars.lr.double() * scalars.weight_decay.double()).masked_fill(skipped, 1.0)
            torch._foreach_mul_(self._decayed, factor.to(self._decayed[0].dtype))
        lr = scalars.lr.masked_fill(skipped, 0.0)
        for _, targets, values in self._matrices.update(self._gradients, self._masters, directions):
            torch._foreach_mul_(values, lr)
            torch._foreach_sub_(targets, values)

    def _direction(self, block: Block, gradient: Tensor, skipped: Tensor, is_first: bool) -> Tensor:
        """Adam's direction [O, I] in the matrix's bases; then the factors advance, and maybe the bases."""
        config, state = self._config, self._moments[block]
        direction = torch.zeros_like(gradient)
        if not is_first:
            direction = self._adam(state, gradient, self._step_of[block.name].to(gradient.device), skipped)
        kept = torch.full((), config.factor_beta, dtype=gradient.dtype, device=gradient.device)
        kept = kept.masked_fill(skipped, 1.0)
        number = FIRST if is_first else int((self._run.step - 1) % config.refresh_every == 0)
        for dim, side, product in ((0, state.left, gradient @ gradient.mT), (1, state.right, gradient.mT @ gradient)):
            if side is not None:
                side.advance(product, kept)
                if number:
                    ordered = state.second.index_select(dim, side.refresh(number, config.shift, skipped))
                    state.second.copy_(torch.where(skipped, state.second, ordered))
        return direction

    def _adam(self, state: Moments, gradient: Tensor, step: Tensor, skipped: Tensor) -> Tensor:
        beta1, beta2 = self._config.beta1, self._config.beta2
        weights = (torch.full_like(gradient[0, 0], 1 - beta).masked_fill(skipped, 0.0) for beta in (beta1, beta2))
        for moment, value, weight in zip(
            (state.first, state.second), (gradient, state.into(gradient).square()), weights, strict=True
        ):
            moment.lerp_(value, weight)
        count = step.clamp(min=1.0).to(torch.float64)
        mean, square = ((1 - beta**count).to(gradient.dtype) for beta in (beta1, beta2))
        root = (state.second / square).sqrt_().add_(self._config.eps)
        return state.back(state.into(state.first).div_(mean * root))

    def state(self, piece: Piece) -> dict[str, Tensor | ShapedState]:
        """The number of updates, and what this rank owns; the matrices of a fused weight are numbered."""
        found: dict[str, Tensor | ShapedState] = {"step": self._step_of[piece.name]}
        parts = defaultdict[str, dict[tuple[int, ...], Tensor]](dict)
        shapes: dict[str, tuple[int, ...]] = {}
        shape = piece.placement.shape
        stack = len(shape) - 2
        is_fused = any(len(dim) > 1 for dim in piece.placement.dims[stack:])
        for block, moments in self._moments.items():
            if block.name != piece.name:
                continue
            suffix = f".{block.segment}" if is_fused else ""
            for name, tensor in _named(moments):
                view = tensor.view(*(1,) * stack, *tensor.shape)
                parts[f"{name}{suffix}"][(*block.start[:stack], 0, 0)] = view
                shapes[f"{name}{suffix}"] = (*shape[:stack], *tensor.shape)
        return found | {name: ShapedState(shapes[name], own, writes=True) for name, own in parts.items()}


def _named(moments: Moments) -> list[tuple[str, Tensor]]:
    """The tensors of a matrix by the names of its states.

    The second moment is that of other coordinates than Adam's, so no other optimizer reads it by Adam's name.
    """
    found = [("exp_avg", moments.first), ("exp_avg_sq_in_bases", moments.second)]
    for name, side in (("left", moments.left), ("right", moments.right)):
        if side is not None:
            found += [(f"{name}_factor", side.factor), (f"{name}_basis", side.basis)]
    return found
