"""The buffers that suppliers keep for sites, and the update of their states at the end of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug.model.products import Update
from mplug.model.slots.offers import Offer, Site
from mplug.model.slots.slot_buffer import SlotBuffer
from mplug_products.slot_buffers import buffer_name, held


@dataclass(frozen=True)
class HeldBuffers:
    """The buffers of one site, as the offer of its supplier declares them."""

    site: Site
    offer: Offer
    declared: Mapping[str, SlotBuffer]

    def tensors(self) -> dict[str, Tensor]:
        """The buffers by the names that the offer gives them."""
        return held(self.site.module, self.site.slot)

    def full_name(self, name: str) -> str:
        """The name of a buffer in the whole model."""
        own = buffer_name(self.site.slot, name)
        return f"{self.site.name}.{own}" if self.site.name else own


def slot_updates(all_held: Iterable[HeldBuffers]) -> list[Update]:
    """One function for each role whose offer has `step_ended`, for buffers that have memory."""
    groups: dict[tuple[str, str, tuple[tuple[str, SlotBuffer], ...]], list[HeldBuffers]] = {}
    for one in all_held:
        if one.offer.step_ended is not None:
            key = (one.site.role, one.site.slot, tuple(one.declared.items()))
            groups.setdefault(key, []).append(one)
    return [_update_of(sites) for sites in groups.values()]


def _update_of(sites: list[HeldBuffers]) -> Update:
    """The update of sites of one role with equal declarations: a few operations for all of them together."""
    tensors = [one.tensors() for one in sites]
    lists = {name: [own[name] for own in tensors] for name in sites[0].declared}

    @torch.no_grad()
    def update(skip: Tensor) -> None:
        stacked = {name: torch.stack(values) for name, values in lists.items()}
        for name, value in updated(sites[0], stacked).items():
            kept = torch.where(skip == 0, value, stacked[name])
            torch._foreach_copy_(lists[name], list(kept.unbind()))

    return update


def updated(one: HeldBuffers, stacked: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The new states of stacked buffers; ValueError if `step_ended` returns anything else than states."""
    assert one.offer.step_ended is not None
    values = one.offer.step_ended(stacked)
    for name, value in values.items():
        where = f"{one.offer.plugin}: step_ended of {one.site.slot} returns '{name}'"
        if name not in one.declared:
            raise ValueError(f"{where}, which Offer.buffers does not declare")
        if one.declared[name].over:
            raise ValueError(f"{where}, which is a statistic of the step; only states have new values")
        if value.shape != stacked[name].shape or value.dtype != stacked[name].dtype:
            raise ValueError(
                f"{where} as {value.dtype} of shape {tuple(value.shape)}; it must have {stacked[name].dtype} and "
                f"{tuple(stacked[name].shape)} (the sites, then the shape of the buffer)"
            )
    return values
