"""The update. O rows and I columns of a matrix."""

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from mplug import Optimizer, Piece, StepScalars

if TYPE_CHECKING:
    from nova_orthon import Orthon

State = dict[str, Tensor]


class Rule(Protocol):
    """How a piece is updated."""

    state: State

    def advance(self, gradient: Tensor) -> tuple[Tensor, State]:
        """(the direction of descent, the state afterwards); nothing is changed."""


class OrthogonalMomentum:
    """Muon (Jordan et al. 2024) with Nesterov's momentum, scaled as in arXiv 2502.16982, section 2.2."""

    def __init__(self, piece: Piece, rank: int, config: "Orthon.Config") -> None:
        self.momentum, self.rms = config.momentum, config.rms
        self.matrices = [
            tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
            for box in piece.placement.boxes(rank)
        ]
        self.state = {"momentum": torch.zeros_like(piece.master)}

    def advance(self, gradient: Tensor) -> tuple[Tensor, State]:
        """Each matrix of the piece by itself."""
        momentum = self.momentum * self.state["momentum"] + gradient
        ahead, direction = self.momentum * momentum + gradient, torch.zeros_like(gradient)
        for matrix in self.matrices:
            longest = max(ahead[matrix].shape[-2:])
            direction[matrix] = self.rms * longest**0.5 * orthogonalized(ahead[matrix])
        return direction, {"momentum": momentum}


class Adam:
    """Adam (arXiv 1412.6980), element by element."""

    def __init__(self, piece: Piece, config: "Orthon.Config") -> None:
        self.beta1, self.beta2, self.eps = config.beta1, config.beta2, config.eps
        self.state = {
            "first": torch.zeros_like(piece.master),
            "second": torch.zeros_like(piece.master),
            "steps": torch.zeros((), device=piece.master.device),
        }

    def advance(self, gradient: Tensor) -> tuple[Tensor, State]:
        """Moments without their bias towards the zeros that they begin with."""
        steps = self.state["steps"] + 1
        first = self.beta1 * self.state["first"] + (1 - self.beta1) * gradient
        second = self.beta2 * self.state["second"] + (1 - self.beta2) * gradient.square()
        mean, square = first / (1 - self.beta1**steps), second / (1 - self.beta2**steps)
        return mean / (square.sqrt() + self.eps), {"first": first, "second": second, "steps": steps}


class Muon(Optimizer):
    """A rule for each piece: matrices of hidden layers get orthogonalised momentum, everything else Adam."""

    needs: Literal["matrices"] = "matrices"

    def __init__(self, pieces: list[Piece], rank: int, config: "Orthon.Config") -> None:
        self.pieces = pieces
        self.rules: dict[str, Rule] = {
            piece.name: OrthogonalMomentum(piece, rank, config)
            if is_matrix(piece, config.tables)
            else Adam(piece, config)
            for piece in pieces
        }

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        for piece in self.pieces:
            rule = self.rules[piece.name]
            direction, state = rule.advance(piece.gradient * scalars.scale)
            decay = scalars.weight_decay if piece.parameter.decays else 0.0
            _write(piece.master, piece.master * (1 - scalars.lr * decay) - scalars.lr * direction, skipped)
            for name, value in state.items():
                _write(rule.state[name], value, skipped)

    def state(self, piece: Piece) -> State:
        """The live momentum of a matrix, or the live moments and step count of anything else."""
        return self.rules[piece.name].state


def is_matrix(piece: Piece, tables: tuple[str, ...]) -> bool:
    """Whether a piece multiplies activations; the rows of a look-up table are vectors of their own."""
    return len(piece.parameter.dims) >= 2 and not piece.parameter.axes & set(tables)


def _write(tensor: Tensor, value: Tensor, skipped: Tensor) -> None:
    """The value, whatever it is, takes no effect where the step is skipped."""
    tensor.copy_(torch.where(skipped, tensor, value))


def orthogonalized(x: Tensor) -> Tensor:
    """x [..., O, I] with all singular values about 1: five Newton-Schulz steps (Jordan et al. 2024)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller side's Gram matrix is cheaper
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
