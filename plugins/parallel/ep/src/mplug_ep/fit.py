"""Refuse layouts that do not fit a model's experts, before any process starts."""

from math import prod

from mplug import Mesh, Model, Run, UsageError


def refuse_what_does_not_fit(run: Run, model: Model, axis: str) -> None:
    """Raise UsageError if `axis` splits no parameter of the model, or if tokens cannot be split evenly.

    Ranks that hold copies of the same tokens must be able to split a sample's tokens evenly among themselves.
    """
    size = run.mesh.axes[axis].size
    if size == 1:
        return
    if not any(axis in placement.splits.values() for placement in model.placements.values()):
        raise UsageError(
            f"{axis}={size} splits experts, and the model '{run.config.settings['model', 'name'].value}' has none; "
            f"use a model with experts, or a layout without {axis}"
        )
    _refuse_uneven_tokens(run.mesh, run.config.trainer.seq_length)


def copying_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes along which ranks hold copies of the same tokens: they split no batch, sequence or units."""
    return tuple(
        axis.name
        for axis in mesh.views["dense"]
        if axis.size > 1 and not axis.entries and not axis.divides("sequence") and not axis.divides("units")
    )


def _refuse_uneven_tokens(mesh: Mesh, seq_length: int) -> None:
    copies = [mesh.axes[name] for name in copying_axes(mesh)]
    length = seq_length // prod(axis.size for axis in mesh.views["dense"] if "sequence" in axis.entries)
    if length % prod(axis.size for axis in copies):
        degrees = " and ".join(f"{axis.name}={axis.size}" for axis in copies)
        raise UsageError(
            f"the ranks of {degrees} hold the same {length} tokens of a sample and must split them evenly before the "
            f"experts, but {degrees} does not divide {length}; change trainer.seq_length or the layout, or use "
            f"sequence parallelism, which splits the tokens already"
        )


def refuse_parts_without_tokens(run: Run, parts: int) -> None:
    """Raise UsageError if a part of a micro batch (`parallel.ep.parts`) would have no token on a rank."""
    if run.mesh.axes["ep"].size == 1:
        return
    dividing = prod(axis.size for axis in run.mesh.views["dense"] if axis.divides("sequence"))
    copies = prod(run.mesh.axes[name].size for name in copying_axes(run.mesh))
    length = run.config.trainer.seq_length // dividing // copies
    if parts > length:
        raise UsageError(
            f"parallel.ep.parts={parts} divides the tokens of a micro batch, and a rank computes {length} tokens of a "
            f"sample; use at most {length} parts"
        )
