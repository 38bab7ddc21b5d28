"""The activations that travel between the chunks of a pipeline: their shapes, and the bytes that a rank sends."""

from collections import Counter
from math import prod

from mplug.model.placed import Placed
from mplug.run.run import Run
from mplug_schedules.actions import TRANSFERS, Kind, Table


def shape_of(run: Run, model: Placed, name: str) -> tuple[int, ...] | None:
    """The shape of a rank's part of an activation of one micro batch, from the declared axes of the plan.

    Ranks divide the sequence under context and sequence parallelism. None if the plan does not state the length of an
    axis.
    """
    if name not in model.plan.activations:
        return None
    lengths = {"batch": run.micro_batch_size, "sequence": run.config.trainer.seq_length}
    lengths |= {axis: stream.rows * run.micro_batch_size for axis, stream in model.plan.streams.items()}
    for placement in model.placements.values():
        for dim in placement.dims:
            if len(dim) == 1:
                lengths.setdefault(dim[0].axis, dim[0].length)
    shape = []
    for named in model.plan.activations[name]:
        if named not in lengths:
            return None
        length = lengths[named]
        for axis in run.mesh.views["dense"]:
            if named != "batch" and (named in axis.entries or named in axis.activations):
                length = -(-length // axis.size)
        shape.append(length)
    return tuple(shape)


def bytes_entering(run: Run, model: Placed, chunk: int) -> int | None:
    """Bytes of the activations of one micro batch that enter a chunk, or None if a shape is not declared."""
    return _bytes_of(run, model, model.crossing(chunk))


def bytes_returning(run: Run, model: Placed, chunk: int) -> int | None:
    """Bytes of the gradients of these activations that leave the chunk, or None if a shape is not declared."""
    return _bytes_of(run, model, tuple(name for name in model.crossing(chunk) if name in model.learning(chunk)))


def bytes_sent(run: Run, model: Placed, table: Table, rank: int) -> int | None:
    """Bytes that a rank of the pipeline sends in a step, or None if a shape is not declared."""
    total = 0
    for (kind, chunk), number in Counter((one.kind, one.chunk) for one in table.rows[rank]).items():
        if kind in TRANSFERS:
            forward = kind is Kind.SEND_FORWARD
            size = bytes_entering(run, model, chunk + 1) if forward else bytes_returning(run, model, chunk)
            if size is None:
                return None
            total += number * size
    return total


def _bytes_of(run: Run, model: Placed, names: tuple[str, ...]) -> int | None:
    itemsize: int = run.precision.activation_dtype.itemsize
    shapes = [shape_of(run, model, name) for name in names]
    return None if None in shapes else sum(itemsize * prod(shape) for shape in shapes if shape is not None)
