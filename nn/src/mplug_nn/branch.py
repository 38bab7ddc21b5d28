"""Blocks of a single residual branch (Nemotron-H, arXiv 2504.03624). B batch, S sequence, D embed, M documents."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import Tensor, nn

from mplug.model.slots.declaration import Fusible, states
from mplug_nn.fusible import fusible_norm, normed
from mplug_nn.moe import MixtureOfExperts
from mplug_nn.norm import Norm


class Branch(nn.Module):
    """x + part(norm(x)): the common part of `MixerBranch`, `MLPBranch` and `ExpertsBranch`."""

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot; a router declares its mixing

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def reader(self) -> nn.Module | None:
        """The module to which `branch` hands its x, and nothing else reads x; None if there is none."""
        return None

    def branch(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """The part, without norm and residual: [B, S, D] -> [B, S, D]."""
        raise NotImplementedError

    def fusibles(self) -> Iterator[Fusible]:
        """The norm, if only one linear layer reads its result."""
        yield from fusible_norm(self.norm, self.reader() if states(self, "reader", "branch") else None)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], keys [B], lengths [B, M] if samples are packed -> [B, S, D]."""
        h, x = normed(self.norm, self.reader(), x)
        return x + self.branch(h, positions, keys, document_lengths)


class MixerBranch(Branch):
    """A branch that mixes positions: attention, or a scan."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, norm: Norm, attn: nn.Module) -> None:
        super().__init__(norm)
        self.attn = attn

    def reader(self) -> nn.Module:
        """The mixer."""
        return self.attn

    def branch(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.attn(x, positions, keys, document_lengths)
        return y


class MLPBranch(Branch):
    """A branch with an MLP."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, norm: Norm, mlp: nn.Module) -> None:
        super().__init__(norm)
        self.mlp = mlp

    def reader(self) -> nn.Module:
        """The MLP."""
        return self.mlp

    def branch(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.mlp(x)
        return y


class ExpertsBranch(Branch):
    """A branch with a mixture of experts."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, norm: Norm, moe: MixtureOfExperts) -> None:
        super().__init__(norm)
        self.moe = moe

    def branch(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.moe(x, positions, keys, document_lengths)
        return y


class Branches(nn.Module):
    """Branches in the place of one block, as in a depth of multi-token prediction of Nemotron 3."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({str(number): branch for number, branch in enumerate(branches)})

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """The arguments and the result of a `Branch`."""
        for branch in self.branches.values():
            x = branch(x, positions, keys, document_lengths)
        return x
