"""The third stage of a model: the units of one rank, and what computes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mplug.layout.plan import Unit
from mplug.model.placed import Placed
from mplug.model.slots.declaration import Slot, declared_slots
from mplug.model.slots.offers import Filled
from mplug.model.units import run_units


@dataclass
class RankPart(Placed):
    """A model of which this rank keeps its units, with the suppliers in their slots.

    `slot_buffers` are the buffers that suppliers of this rank's slots keep (`mplug_products.HeldBuffers`). `seeds` are
    those of torch's generators (`mplug.model.seeds.Seeds`).
    """

    own_units: tuple[Unit, ...] = ()
    own_chunks: tuple[int, ...] = (0,)
    slots: list[Filled] = field(default_factory=list)
    unit_wraps: list[Filled] = field(default_factory=list)
    slot_buffers: list[Any] = field(default_factory=list)
    seeds: Any = None
    _declared: dict[str, Slot] | None = None

    @property
    def declared(self) -> dict[str, Slot]:
        """The slots that the blocks of the whole model declare, by name, also those of other stages of a pipeline."""
        return declared_slots(self.module.modules()) if self._declared is None else self._declared

    def keep_stage(self, rank: int) -> None:
        """Remove the units of other ranks' chunks; `rank` is the index along the pipeline's axis.

        It sets `own_chunks`, and `own_units` to the remaining units.
        """
        self._declared = self.declared
        self.own_chunks = self.stages.chunks_of(rank)
        kept = {name for chunk in self.own_chunks for name in self.stages.units[chunk]}
        for unit in self.plan.units:
            if unit.name not in kept:
                parent, _, child = unit.name.rpartition(".")
                delattr(self.module.get_submodule(parent), child)
        self.own_units = tuple(unit for unit in self.plan.units if unit.name in kept)

    def units_of(self, chunk: int) -> tuple[Unit, ...]:
        """The units of a chunk of this rank."""
        return tuple(unit for unit in self.own_units if self.stages.of[unit.name] == chunk)

    @property
    def has_backward(self) -> bool:
        """Whether this rank runs backward passes: a unit in one of its chunks, or before it, is trained."""
        return any(self.learning(chunk + 1) for chunk in self.own_chunks)

    def run(self, batch: Mapping[str, Tensor], chunk: int | None = None) -> dict[str, Tensor]:
        """Run this rank's units, or those of one chunk, on a micro batch's entries and the activations before them."""
        units = self.own_units if chunk is None else self.units_of(chunk)
        if self.seeds is None or not self.module.training:
            return run_units(self.module, units, batch)
        key = self.seeds.key_in(batch)
        begin = None if key is None else partial(self.seeds.begin, key=key)
        return run_units(self.module, units, batch, begin)

    def outputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run all units on a micro batch: the loss, the number of targets, and what else their unit returns."""
        values = self.run(batch)
        return {name: values[name] for name in self.plan.results}

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run all units on a micro batch: (sum of the losses, number of targets)."""
        values = self.outputs(batch)
        return values["loss"], values["num_targets"]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The logits [B, S, V] that the plan's inference units compute."""
        return run_units(self.module, self.plan.inference, batch)["logits"]
