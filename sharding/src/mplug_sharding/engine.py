"""Runs whose masters, optimizer states and gradients an engine of another framework keeps (`Sharding.engine`)."""

from collections.abc import Iterable

import torch

from mplug.contracts.optimizer import Piece
from mplug.errors import UsageError, listed
from mplug.model.model import Model
from mplug.run.run import Run


def refuse_incomplete_engine(run: Run, model: Model) -> None:
    """Raise UsageError if a strategy with an engine lacks a stepper, or its engine lacks or divides a gradient wrongly.

    Without sinks, nothing else computes a step or sums a gradient over data-parallel ranks.
    """
    if model.engine is None or model.sharding is None:
        return
    (label,) = run.hooks.implementers("shard_states")
    if run.mesh.independent:
        raise UsageError(
            f"the engine of {label} trains one model on all ranks, and ranks along {listed(run.mesh.independent)} "
            f"train independently; use a layout without one of the two"
        )
    if label not in run.hooks.implementers("build_stepper" if model.pipeline is None else "build_pipeline"):
        raise UsageError(
            f"{label} declines gradient sinks (Sharding.engine), and has no stepper that computes gradients without "
            f"them; implement build_stepper in {label}"
        )
    for name in model.parameters():
        placement = model.placements[name]
        if not placement.parameter.trainable:
            continue
        bucket = model.sharding.of.get(name)
        if bucket is None or set(bucket.axes) != set(placement.data_axes):
            summed = f"sums it over {bucket.axes}" if bucket else "does not have it"
            raise UsageError(
                f"the gradient of '{name}' must be summed over the axes {placement.data_axes}, and the engine of "
                f"{label} {summed}; use a layout without the other strategies that divide the batch, or without {label}"
            )


def refuse_other_sums(run: Run, model: Model, others: Iterable[str]) -> None:
    """Raise UsageError if a plugin besides the one with the engine sums gradients: it would listen to no sink."""
    if model.engine is None:
        return
    (label,) = run.hooks.implementers("shard_states")
    for other in others:
        if other != label:
            raise UsageError(
                f"{other} sums gradients by listening to their sinks, and {label} declines sinks (Sharding.engine), so "
                f"{other} would sum nothing; use a layout without one of the two"
            )


def pieces_of_engine(model: Model) -> list[Piece]:
    """The pieces that the strategy has supplied, after a check that they are this rank's parts by the sharding."""
    assert model.sharding is not None
    rank_of = {piece.name: piece for piece in model.supplied}
    if len(rank_of) != len(model.supplied):
        raise ValueError("model.supply has received two pieces of one parameter")
    for piece in model.supplied:
        if piece.name not in model.sharding.of:
            raise ValueError(f"model.supply has received a piece of '{piece.name}', which is in no bucket")
        if piece.placement != model.sharding.placed(model.placements[piece.name]):
            raise ValueError(f"the placement of the supplied piece of '{piece.name}' is not that of the sharding")
        if piece.master.dtype != model.master_dtype or piece.weight is not None:
            raise ValueError(
                f"the supplied piece of '{piece.name}' must have a master of {model.master_dtype} and no weight"
            )
    return list(model.supplied)


def refuse_missing_pieces(model: Model, pieces: list[Piece], rank: int) -> None:
    """Raise ValueError unless every part that this rank owns by the sharding has a piece of its shape."""
    assert model.sharding is not None
    shapes = {piece.name: tuple(piece.master.shape) for piece in pieces}
    for name in model.sharding.of:
        placement = model.sharding.placed(model.placements[name])
        expected = placement.local_shape(rank) if placement.holds(rank) else None
        if shapes.get(name) != expected:
            raise ValueError(
                f"this rank's piece of '{name}' must have the shape {expected} (None: no piece), and the engine's "
                f"strategy has supplied {shapes.get(name)}"
            )


def planned_pieces(run: Run, model: Model) -> list[Piece]:
    """The pieces that the engine will supply on this rank, in new memory (fake memory in a FakeTensorMode)."""
    assert model.sharding is not None
    pieces = []
    for name in model.sharding.of:
        placement = model.sharding.placed(model.placements[name])
        if placement.holds(run.rank):
            shape = (2, *placement.local_shape(run.rank))
            master, gradient = torch.zeros(shape, dtype=run.precision.master_dtype, device=run.device).unbind()
            pieces.append(Piece(name, master, gradient, None, placement.parameter, placement))
    return pieces
