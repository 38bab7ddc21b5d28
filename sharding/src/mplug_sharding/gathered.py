"""The placement of a parameter whose rows are sharded at rest, and gathered for computation (FSDP).

The local tensor holds this rank's rows: the fp32 master that the optimizer updates. For computation the plugin gathers
the rows of all ranks along the axis. It sums the gradient over the same ranks, and passes this rank's rows of it to the
gradient sink.

A frozen parameter is sharded in the same way. Its local tensor has the precision of the run, and it has no gradient.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from mplug.errors import UsageError
from mplug.layout.placement import Box, Placement, facts_of


@dataclass(frozen=True, kw_only=True)
class GatheredPlacement(Placement):
    """A placement whose rows are sharded along a mesh axis: each rank keeps a range of rows, cut by `torch.chunk`.

    `torch.chunk` applies to dimension 0 of the local tensor that the plan and the other axes give a rank
    (`gathered_shape`, padding included). The last ranks may have fewer rows, or none. With `in_host_memory`, a rank
    keeps its rows in CPU memory instead of on its device. With `as_copies`, ranks gather the copies of the weight that
    a product reads instead of the weight, if the product allows it (`mplug_products.gathered_copies`).
    """

    axis: str
    in_host_memory: bool = False
    as_copies: bool = False

    @classmethod
    def of(
        cls, placement: Placement, axis: str, in_host_memory: bool = False, as_copies: bool = False
    ) -> "GatheredPlacement":
        """Shard the rows of `placement` along one of its data axes; UsageError if another axis shards them already."""
        if placement.gathered_along is not None:
            raise UsageError(
                f"axes '{placement.gathered_along}' and '{axis}' both divide the rows of '{placement.name}' at rest; "
                f"name one of their strategies in the layout"
            )
        assert axis in placement.data_axes, f"the gradient of '{placement.name}' is not partial over axis '{axis}'"
        facts = facts_of(replace(placement, apart=(*placement.apart, axis), summed=(*placement.summed, axis)))
        return cls(**facts, axis=axis, in_host_memory=in_host_memory, as_copies=as_copies)

    @property
    def gathered_along(self) -> str | None:
        """The mesh axis along which the rows are gathered."""
        return self.axis

    @property
    def offloaded(self) -> bool:
        """Whether the local tensor is in CPU memory, even if the run's device is a GPU."""
        return self.in_host_memory

    @property
    def gathers_copies(self) -> bool:
        """Whether ranks gather the copies of the weight that a product reads, instead of the weight."""
        return self.as_copies

    def gathered_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the gathered tensor that `rank` computes with, padding included."""
        return super().local_shape(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rows that the rank keeps."""
        rows = self._rows(rank)
        return (len(rows), *self.gathered_shape(rank)[1:])

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The parts of the gathered tensor's boxes that lie in the rank's rows."""
        rows, found = self._rows(rank), list[Box]()
        for box in super().boxes(rank):
            first, last = box.offset[0], box.offset[0] + box.shape[0]
            start, stop = max(first, rows.start), min(last, rows.stop)
            if start < stop:
                found.append(
                    replace(
                        box,
                        start=(box.start[0] + start - first, *box.start[1:]),
                        shape=(stop - start, *box.shape[1:]),
                        offset=(start - rows.start, *box.offset[1:]),
                    )
                )
        return tuple(found)

    @cached_property
    def rows_each(self) -> int:
        """The number of rows of each rank, padding included."""
        return max(1, -(-self.gathered_shape(0)[0] // self.mesh.axes[self.axis].size))

    def _rows(self, rank: int) -> range:
        rows, each = self.gathered_shape(rank)[0], self.rows_each
        start = min(self.mesh.index(rank, self.axis) * each, rows)
        return range(start, min(start + each, rows))
