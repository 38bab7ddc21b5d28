"""The copies of the weights of a unit that its products read, made of this rank's rows (`mplug_nn.GatheredForm`).

Copies travel instead of the weights. All memory here is used on the lane's stream, except what products read.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

import mplug_ops as ops
from mplug import GradientSink
from mplug_fsdp.memory import Format
from mplug_ops.transfers import join_each
from mplug_products import GatheredCopies

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Place(NamedTuple):
    """An attribute of a module that holds a parameter; `table` are the parameters of the module by attribute."""

    table: dict[str, nn.Parameter | None]
    attribute: str


class Rows(NamedTuple):
    """This rank's rows of a parameter, the shape of the whole, the sink of the rows (None: frozen), and its places.

    `copies` are those that ranks gather instead of the parameter, if they do.
    """

    name: str
    values: nn.Parameter
    shape: tuple[int, ...]
    sink: GradientSink | None
    places: list[Place]
    copies: GatheredCopies | None = None


def formats_of(copies: GatheredCopies) -> list[Format]:
    """The formats of the whole copies that ranks gather."""
    travelling = zip(copies.like, copies.form.along_rows, strict=True)
    return [Format(tuple(one.shape), one.dtype) for one, travels in travelling if travels]


class UnitCopies:
    """The copies of the weights of a unit: those that ranks gather are in `whole`, in the order of `rows`.

    The others, such as scales of whole weights, every rank computes itself. The largest values over the ranks are found
    once for each version of the weights.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        whole: Iterable[Tensor],
        dtype: torch.dtype,
        group: "ProcessGroup",
        device: torch.device,
    ) -> None:
        self._dtype, self._group, self._device = dtype, group, device
        self._rows = [(one, one.copies) for one in rows if one.copies is not None]
        self._largest: list[Tensor] | None = None
        items = (ops.Item(one.name, one.shape) for one, _ in self._rows)
        self._exchange = ops.Exchange("largest values of rows", group, items)
        gathered, self._own, self._held = iter(whole), list[list[Tensor]](), list[tuple[Tensor, ...]]()
        for _, copies in self._rows:
            own = [
                torch.empty(one.shape, dtype=one.dtype, device=device) for one in self._computed(copies, copies.like)
            ]
            # Autograd checks that the tensors that it saves do not change: `data` has a version counter of its own.
            computed = iter([one.data for one in own])
            self._own.append(own)
            self._held.append(tuple(next(gathered if travels else computed) for travels in copies.form.along_rows))

    def cast(self) -> list[Tensor]:
        """What this rank sends: the copies [n] of its rows. The copies that do not travel get their values."""
        if self._largest is None:
            self._largest = self._largest_of_ranks()
        sent = list[Tensor]()
        for (one, copies), largest, own in zip(self._rows, self._largest, self._own, strict=True):
            made = copies.cast(self._rounded(one), largest)
            sent += [copy.flatten() for copy, travels in zip(made, copies.form.along_rows, strict=True) if travels]
            for place, copy in zip(own, self._computed(copies, made), strict=True):
                place.copy_(copy)
        return sent

    def show(self) -> None:
        """Let the products read the whole copies."""
        for (_, copies), held in zip(self._rows, self._held, strict=True):
            copies.hold(held)

    def hide(self) -> None:
        """Let no product read them, because their memory is freed."""
        for _, copies in self._rows:
            copies.hold(())

    def forget(self) -> None:
        """Find the largest values again, because the rows have new values."""
        self._largest = None

    @staticmethod
    def _computed(copies: GatheredCopies, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [one for one, travels in zip(tensors, copies.form.along_rows, strict=True) if not travels]

    def _rounded(self, one: Rows) -> Tensor:
        """This rank's rows in the precision of the weights, padded with zeros: as many as other ranks have."""
        each = -(-one.shape[0] // self._group.size())
        rows = torch.zeros(each, *one.shape[1:], dtype=self._dtype, device=self._device)
        rows[: len(one.values)].copy_(one.values.detach(), non_blocking=True)
        return rows

    def _largest_of_ranks(self) -> list[Tensor]:
        """What `GatheredForm.cast` takes: the elementwise maximum over the ranks; NaN is the largest number."""
        own = [copies.largest(self._rounded(one)) for one, copies in self._rows]
        flat = torch.cat([one.flatten() for one in own])
        if not flat.numel():
            return own
        self._exchange.check()
        found = flat.new_empty(self._group.size(), flat.numel())
        join_each([found], [flat], self._group)
        parts = found.amax(dim=0).split([one.numel() for one in own])
        return [part.to(one.dtype).view(one.shape) for part, one in zip(parts, own, strict=True)]
