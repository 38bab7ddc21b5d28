"""What the host asks of the package that keeps optimizer states which ranks share (`mplug.Sharding`)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mplug.registry.provided import needed

if TYPE_CHECKING:
    import torch

    from mplug.contracts.optimizer import Piece
    from mplug.model.model import Model
    from mplug.run.run import Run


class Shardings(Protocol):
    """The methods of the class in the entry-point group 'mplug.shardings'; called for models with a sharding."""

    def refuse(self, run: "Run", model: "Model") -> None:
        """Raise UsageError if the sharding, or its engine, does not fit the model and the layout."""

    def refuse_other_sums(self, run: "Run", model: "Model", others: Iterable[str]) -> None:
        """Raise UsageError if a plugin besides the one with the engine sums gradients: it would listen to no sink."""

    def memory(self, model: "Model", rank: int, device: "torch.device", dtype: "torch.dtype") -> Any:
        """The memory of this rank's buckets, for `Model.shards`.

        `weight(name)` is a parameter's view, or None; `listen(dtype)` allocates gradients and returns their views by
        name; `pieces()` are this rank's pieces by the names of parameters, None where it owns nothing.
        """

    def pieces_of_engine(self, model: "Model") -> "list[Piece]":
        """The pieces that the strategy with the engine has supplied, after a check that they are this rank's parts."""

    def refuse_missing_pieces(self, model: "Model", pieces: "list[Piece]", rank: int) -> None:
        """Raise ValueError unless every part that this rank owns by the sharding has a piece of its shape."""

    def planned_pieces(self, run: "Run", model: "Model") -> "list[Piece]":
        """The pieces that the engine will supply on this rank, in new memory."""


def shardings() -> Shardings:
    """The installed class. UsageError if there is none."""
    found: Shardings = needed("shardings", "a strategy that shards optimizer states", "mplug-sharding")
    return found
