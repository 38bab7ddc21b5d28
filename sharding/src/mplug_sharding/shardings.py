"""What the host asks about sharded optimizer states (`mplug.model.sharding.Shardings`)."""

from collections.abc import Iterable

import torch

from mplug.contracts.optimizer import Piece
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_sharding.engine import (
    pieces_of_engine,
    planned_pieces,
    refuse_incomplete_engine,
    refuse_missing_pieces,
    refuse_other_sums,
)
from mplug_sharding.owned_memory import Shards
from mplug_sharding.refusals import refuse_states_of_frozen, refuse_transient_gradients


class Shardings:
    """The class of the entry-point group 'mplug.shardings'."""

    def refuse(self, run: Run, model: Model) -> None:
        """Raise UsageError if the sharding, or its engine, does not fit the model and the layout."""
        refuse_states_of_frozen(run, model)
        refuse_transient_gradients(run, model)
        refuse_incomplete_engine(run, model)

    def refuse_other_sums(self, run: Run, model: Model, others: Iterable[str]) -> None:
        """Raise UsageError if a plugin besides the one with the engine sums gradients."""
        refuse_other_sums(run, model, others)

    def memory(self, model: Model, rank: int, device: torch.device, dtype: torch.dtype) -> Shards:
        """The memory of this rank's buckets."""
        assert model.sharding is not None
        return Shards(model.sharding, model.placements, rank, device, dtype, model.master_dtype)

    def pieces_of_engine(self, model: Model) -> list[Piece]:
        """The pieces that the strategy with the engine has supplied, checked."""
        return pieces_of_engine(model)

    def refuse_missing_pieces(self, model: Model, pieces: list[Piece], rank: int) -> None:
        """Raise ValueError unless every part that this rank owns has a piece of its shape."""
        refuse_missing_pieces(model, pieces, rank)

    def planned_pieces(self, run: Run, model: Model) -> list[Piece]:
        """The pieces that the engine will supply on this rank, in new memory."""
        return planned_pieces(run, model)
