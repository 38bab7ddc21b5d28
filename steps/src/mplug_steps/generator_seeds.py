"""Seed torch's generators for kernels that draw random numbers themselves, such as the masks of fused dropout.

Such a kernel takes no keys, so its mask depends on the layout. But it is a function of (seed, step, micro batch, unit,
place): in training, the host seeds the generators with a key of these before every unit. So the mask does not depend on
the order in which a pipeline runs its micro batches, on earlier draws, or on a resume, and checkpoints need no
generator state.

The place is the rank's number among the ranks that compute different parts of the unit, or different heads. Ranks that
hold copies of the same heads draw the same numbers; all other ranks draw different ones. Therefore only what is divided
by heads may draw by itself: ranks that hold copies of anything else would draw different masks.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mplug.layout.plan import Plan, Unit
from mplug.tensors.random import key_of
from mplug.training.evaluator import ENTRY

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh
    from mplug.model.slots.offers import Filled
    from mplug.run.run import Run

HEADS = "heads"
"""The named axis of weights that the inputs of a unit do not have."""


class GeneratorSeeds:
    """Seeds the generators of a rank before each unit.

    `drawing` is the label of a plugin whose kernel draws random numbers itself; it is empty if there is none.
    """

    def __init__(self, plan: Plan, mesh: "Mesh", rank: int, device: str, drawing: str) -> None:
        self.device, self.drawing = device, drawing
        self.places = {unit.name: place_of(unit, plan, mesh, rank) for unit in plan.units}

    @cached_property
    def _generators(self) -> tuple[torch.Generator, ...]:
        """The generators of the CPU and of this process's GPU; seeding them does not wait for the device."""
        if not self.device.startswith("cuda"):
            return (torch.default_generator,)
        torch.cuda.init()
        return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]

    def begin(self, unit: Unit, key: int) -> None:
        """Seed the generators for a unit; `key` is the key of the micro batch."""
        number = key_of(key, unit.name, unit.method, self.places[unit.name])
        for generator in self._generators:
            generator.manual_seed(number)

    def key_in(self, batch: Mapping[str, object]) -> int | None:
        """The key of a micro batch; RuntimeError if a kernel draws and the micro batch has no key."""
        key = batch.get(ENTRY)
        if key is None and self.drawing:
            raise RuntimeError(
                f"{self.drawing} draws random numbers, and the stepper runs units on a micro batch without the entry "
                f"'{ENTRY}'; run them on the micro batch that DefaultStepper.entries returns"
            )
        assert key is None or isinstance(key, int), f"the entry '{ENTRY}' of a micro batch is a number on the host"
        return key


def drawing_plugin(run: "Run", slots: "Iterable[Filled]") -> str:
    """The label of a plugin whose dropout mask does not follow from the samples' keys; '' if there is none."""
    for filled in slots:
        if filled.offer is not None and filled.offer.varies(filled.site, run):
            return filled.supplier
    return ""


def place_of(unit: Unit, plan: Plan, mesh: "Mesh", rank: int) -> int:
    """The number of `rank` among the ranks that compute different parts of a unit.

    These differ along mesh axes that divide an input of the unit, or heads. Ranks with the same place hold copies.
    """
    axes = {**plan.context, **plan.activations}
    named = {axis for name in (*unit.inputs, *unit.optional) for axis in axes.get(name, ())}
    return mesh.place(rank, named, HEADS)
