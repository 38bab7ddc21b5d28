"""The memory of a sharded model on one rank: weights and gradients per bucket, and the parts that the rank owns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug.contracts.optimizer import Piece
from mplug.layout.ownership import Bucket, Sharding
from mplug.layout.placement import Placement


class Shard:
    """One bucket's memory: `weights` [length], `gradients` [length]; `owned` is the range of both that this rank owns.

    `gradients` exist after `listen`. The gradients of a transient bucket have memory only between `materialize` and
    `release`; a separate tensor keeps those that this rank owns (`owned_gradients`).
    """

    def __init__(
        self,
        bucket: Bucket,
        owner: int,
        device: torch.device,
        dtype: torch.dtype,
        transient: bool,
        masters: torch.dtype,
    ) -> None:
        self.bucket, self.owner, self.transient, self.master_dtype = bucket, owner, transient, masters
        self.weights = torch.zeros(bucket.length, device=device, dtype=dtype)
        self.owned = bucket.owned(owner)
        self._gradients: Tensor | None = None
        self._kept: Tensor | None = None
        self._masters: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """The gradients of the whole bucket."""
        assert self._gradients is not None, "the model does not listen yet"
        return self._gradients

    def listen(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Allocate the gradients; returns each parameter's view of them, in the parameter's shape."""
        self._gradients = torch.zeros_like(self.weights, dtype=dtype)
        views = {name: self.tensor(self._gradients, name, shapes[name]) for name in self.bucket.names}
        if self.transient:
            self._kept = self.weights.new_zeros(self.bucket.num_owned, dtype=dtype)
            self.release()
        return views

    def materialize(self) -> None:
        """Allocate memory for the bucket's gradients; its values are undefined."""
        self.gradients.untyped_storage().resize_(self.gradients.numel() * self.gradients.itemsize)

    def release(self) -> None:
        """Free the memory of the bucket's gradients."""
        self.gradients.untyped_storage().resize_(0)

    @property
    def owned_gradients(self) -> Tensor:
        """The tensor that keeps the gradients that this rank owns."""
        return self.gradients[self.owned] if self._kept is None else self._kept

    def tensor(self, flat: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter's view, in `shape`, of the bucket's weights or gradients (`flat`)."""
        where = self.bucket.names.index(name)
        start = self.bucket.starts[where]
        return flat[start : start + self.bucket.sizes[where]].view(shape)

    def piece(self, placement: Placement, shape: tuple[int, ...]) -> Piece | None:
        """The piece of a parameter that this rank owns, in `shape`; None if it owns no element."""
        name = placement.name
        start, stop = self.bucket.part(name, self.owner)
        if start == stop:
            return None
        first = self.bucket.starts[self.bucket.names.index(name)] + start - self.owned.start
        within = slice(first, first + stop - start)
        weight = self.weights[self.owned][within].view(shape)
        gradient = self.owned_gradients[within].view(shape)
        if weight.dtype == self.master_dtype:
            return Piece(name, weight, gradient, None, placement.parameter, placement)
        if self._masters is None:
            self._masters = self.weights.new_zeros(self.bucket.num_owned, dtype=self.master_dtype)
        master = self._masters[within].view(shape)
        return Piece(name, master, gradient, weight, placement.parameter, placement)


class Shards:
    """The memory of all buckets, in the order of the sharding, and the placements of the owned parts of parameters."""

    def __init__(
        self,
        sharding: Sharding,
        placements: Mapping[str, Placement],
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        masters: torch.dtype,
    ) -> None:
        self.sharding, self.rank = sharding, rank
        self.placements = {name: sharding.placed(placements[name]) for name in sharding.of}
        mesh = next(iter(placements.values())).mesh
        self.all = [
            Shard(bucket, mesh.number(rank, bucket.axes), device, dtype, sharding.transient, masters)
            for bucket in sharding.buckets
        ]
        self._of = {name: shard for shard in self.all for name in shard.bucket.names}

    def weight(self, name: str) -> Tensor | None:
        """A parameter's view of its bucket's weights; None if it is in no bucket."""
        shard = self._of.get(name)
        return None if shard is None else shard.tensor(shard.weights, name, self._whole_shape(name))

    def listen(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Allocate the gradients of all buckets; returns the view of every parameter that is in a bucket."""
        shapes = {name: self._whole_shape(name) for name in self._of}
        views: dict[str, Tensor] = {}
        for shard in self.all:
            views |= shard.listen(dtype, shapes)
        return views

    def pieces(self) -> dict[str, Piece | None]:
        """This rank's piece of every parameter that is in a bucket; None if it owns no element of it."""
        return {
            name: shard.piece(self.placements[name], self.placements[name].local_shape(self.rank))
            for name, shard in self._of.items()
        }

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        return self.placements[name].whole.local_shape(self.rank)
