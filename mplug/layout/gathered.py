"""The placement of a parameter whose rows are sharded at rest, and gathered for computation (FSDP).

The local tensor holds this rank's rows: the fp32 master that the optimizer updates. For computation the plugin gathers
the rows of all ranks along the axis. It sums the gradient over the same ranks, and passes this rank's rows of it to the
gradient sink.

A frozen parameter is sharded in the same way. Its local tensor has the precision of the run, and it has no gradient.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from mplug.errors import UsageError
from mplug.layout.placement import Box, Placement


@dataclass(frozen=True)
class GatheredPlacement(Placement):
    """A placement whose rows are sharded along a mesh axis: each rank keeps a range of rows, cut by `torch.chunk`.

    `torch.chunk` applies to dimension 0 of the local tensor that the plan and the other axes give a rank
    (`gathered_shape`, padding included). The last ranks may have fewer rows, or none. With `in_host_memory`, a rank
    keeps its rows in CPU memory instead of on its device.
    """

    axis: str
    in_host_memory: bool = False

    @classmethod
    def of(cls, placement: Placement, axis: str, in_host_memory: bool = False) -> "GatheredPlacement":
        """Shard the rows of `placement` along one of its data axes; UsageError if another axis shards them already."""
        if placement.gathered_along is not None:
            raise UsageError(
                f"axes '{placement.gathered_along}' and '{axis}' both divide the rows of '{placement.name}' at rest; "
                f"name one of their strategies in the layout"
            )
        assert axis in placement.data_axes, f"the gradient of '{placement.name}' is not partial over axis '{axis}'"
        return cls(
            placement.name,
            placement.parameter,
            placement.shape,
            placement.mesh,
            placement.holders,
            axis,
            in_host_memory,
        )

    @property
    def gathered_along(self) -> str | None:
        """The mesh axis along which the rows are gathered."""
        return self.axis

    @property
    def offloaded(self) -> bool:
        """Whether the local tensor is in CPU memory, even if the run's device is a GPU."""
        return self.in_host_memory

    def gathered_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the gathered tensor that `rank` computes with, padding included."""
        return super().local_shape(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rows that the rank keeps."""
        rows, *rest = self.gathered_shape(rank)
        return (len(self._rows(rank, rows)), *rest)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The parts of the gathered tensor's boxes that lie in the rank's rows."""
        whole = super().boxes(rank)
        if not whole:
            return ()
        rows = self._rows(rank, self.gathered_shape(rank)[0])
        index = self.mesh.index(rank, self.axis)
        found = []
        for box in whole:
            first, last = box.offset[0], box.offset[0] + box.shape[0]
            start, stop = max(first, rows.start), min(last, rows.stop)
            if start < stop:
                found.append(
                    replace(
                        box,
                        start=(box.start[0] + start - first, *box.start[1:]),
                        shape=(stop - start, *box.shape[1:]),
                        offset=(start - rows.start, *box.offset[1:]),
                        copies=tuple(other for other in box.copies if self.mesh.index(other, self.axis) == index),
                    )
                )
        return tuple(found)

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The partial axes without the gathering axis: the sink receives gradients that are summed over it."""
        return tuple(axis for axis in super().partial_axes if axis != self.axis)

    @cached_property
    def cut_by(self) -> tuple[str, ...]:
        """Mesh axes that cut a matrix, including the gathering axis if a rank keeps only some rows of a matrix."""
        cut = super().cut_by
        if len(self.dims) != 2 or self.axis in cut:
            return cut
        whole = {(box.start, box.shape) for rank in self.holders for box in super(GatheredPlacement, self).boxes(rank)}
        kept = {(box.start, box.shape) for rank in self.holders for box in self.boxes(rank)}
        return cut if kept <= whole else (*cut, self.axis)

    def _rows(self, rank: int, count: int) -> range:
        each = -(-count // self.mesh.axes[self.axis].size)
        start = min(self.mesh.index(rank, self.axis) * each, count)
        return range(start, min(start + each, count))
