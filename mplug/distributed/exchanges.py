"""The order of tensors in a flat buffer that ranks exchange.

A flat buffer has no names. If two ranks concatenate the same tensors in different orders, a sum adds the values of
different tensors to each other, and nothing fails. So the order never comes from a rank's own modules: `in_order`
makes it, from the placements of the whole model. `mplug_ops.Exchange` checks that ranks agree on it.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Item(NamedTuple):
    """A tensor in a flat buffer: its name, its shape, and where it starts in the logical tensor, if it is a part."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" from {list(self.start)}" if any(self.start) else ""
        return f"'{self.name}' {list(self.shape)}{where}"


def in_order(items: Iterable[Item], names: Iterable[str]) -> list[Item]:
    """The items in the order of `names`, and those of one name by their start.

    `names` must be equal on all ranks: those of `Model.placements`, which has all parameters of the model. ValueError
    for an item that has none of them.
    """
    places = {name: place for place, name in enumerate(names)}
    found = list(items)
    if unknown := [item.name for item in found if item.name not in places]:
        raise ValueError(f"'{unknown[0]}' has no placement, so its place in a flat buffer is not known")
    return sorted(found, key=lambda item: (places[item.name], item.start))
