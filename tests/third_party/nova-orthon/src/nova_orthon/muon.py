"""The update. O rows and I columns of a matrix."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mplug import Optimizer, Parameter, Piece, StepScalars

if TYPE_CHECKING:
    from mplug import Assembler
    from mplug_matrices import Matrices
    from nova_orthon import Orthon

State = dict[str, Tensor]


class Rule(Protocol):
    """How a piece is updated, element by element."""

    state: State

    def advance(self, gradient: Tensor) -> tuple[Tensor, State]:
        """(the direction of descent, the state afterwards); nothing is changed."""


class Momentum:
    """Nesterov's momentum; its matrices are the directions after orthogonalisation."""

    def __init__(self, piece: Piece, config: "Orthon.Config") -> None:
        self.momentum = config.momentum
        self.state = {"momentum": torch.zeros_like(piece.master)}

    def advance(self, gradient: Tensor) -> tuple[Tensor, State]:
        """The momentum after one more step of its own, and the momentum."""
        momentum = self.momentum * self.state["momentum"] + gradient
        return self.momentum * momentum + gradient, {"momentum": momentum}


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

    def __init__(self, pieces: list[Piece], assembler: "Assembler", config: "Orthon.Config") -> None:
        self.pieces = pieces
        self.rms = config.rms
        self.matrices: Matrices = assembler.matrices(
            lambda placement: is_matrix(placement.parameter, config.tables),
            cost=lambda rows, columns: rows * columns * min(rows, columns),
        )
        self.rules: dict[str, Rule] = {
            piece.name: Momentum(piece, config) if piece.name in self.matrices.names else Adam(piece, config)
            for piece in pieces
        }

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        rules = [(piece, self.rules[piece.name]) for piece in self.pieces]
        advanced = {piece.name: rule.advance(piece.gradient * scalars.scale) for piece, rule in rules}
        directions = self._orthogonalized({name: direction for name, (direction, _) in advanced.items()})
        for piece, rule in rules:
            direction, (_, state) = directions[piece.name], advanced[piece.name]
            decay = scalars.weight_decay if piece.parameter.decays else 0.0
            _write(piece.master, piece.master * (1 - scalars.lr * decay) - scalars.lr * direction, skipped)
            for name, value in state.items():
                _write(rule.state[name], value, skipped)

    def _orthogonalized(self, directions: State) -> State:
        """The directions, with orthogonalised matrices."""
        found = {name: torch.zeros_like(direction) for name, direction in directions.items()}
        for shape, targets, values in self.matrices.update(directions, found, lambda _, x: orthogonalized(x)):
            for target, value in zip(targets, values, strict=True):
                target.copy_(self.rms * max(shape) ** 0.5 * value)
        return {
            name: found[name] if name in self.matrices.names else direction for name, direction in directions.items()
        }

    def state(self, piece: Piece) -> State:
        """The live momentum of a matrix, or the live moments and step count of anything else."""
        return self.rules[piece.name].state


def is_matrix(parameter: Parameter, tables: tuple[str, ...]) -> bool:
    """Whether a parameter multiplies activations; the rows of a look-up table are vectors of their own."""
    return len(parameter.dims) >= 2 and not parameter.axes & set(tables)


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
