"""Random numbers that a kernel draws by itself, from torch's own generators: the masks of fused dropout.

Such a kernel takes no keys, so its mask cannot be that of one process under every layout. It is a function of (seed,
step, micro batch, unit, place) all the same: in training, the host seeds the generators before every unit by a key of
these. So nothing depends on the order in which a pipeline runs its micro batches, on what was drawn before, or on a
resume, and no generator's state needs saving. The place is that of the rank among those that compute different parts of
the unit, or different heads: ranks that hold copies of attention draw the same numbers, and all others draw numbers of
their own. So nothing but attention may draw by itself: a mask of anything else that ranks hold copies of would differ.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mplug.nn.random import key_of
from mplug.plan import Plan, Unit

if TYPE_CHECKING:
    from mplug.mesh import Mesh
    from mplug.run import Run
    from mplug.slots import Filled

ENTRY = "draws"
"""The entry of a micro batch that holds its key: a number on the host, which no unit takes."""

HEADS = "heads"
"""The named axis that attention's weights have beside those of its inputs."""


def micro_batch_key(seed: int, step: int, number: int) -> int:
    """The key of a step's micro batch; the first has number 0."""
    return key_of(seed, "draws", step, number)


class Draws:
    """Seeds the generators that kernels of a rank draw from, unit by unit.

    `drawing` is the label of a plugin that says that it draws, or empty.
    """

    def __init__(self, plan: Plan, mesh: "Mesh", rank: int, device: str, drawing: str) -> None:
        self.device, self.drawing = device, drawing
        self.places = {unit.name: place_of(unit, plan, mesh, rank) for unit in plan.units}

    @cached_property
    def _generators(self) -> tuple[torch.Generator, ...]:
        """The CPU's, and that of the GPU which this process computes on: seeding either waits for nothing."""
        if not self.device.startswith("cuda"):
            return (torch.default_generator,)
        torch.cuda.init()
        return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]

    def begin(self, unit: Unit, key: int) -> None:
        """Let a unit draw the numbers of the micro batch with this key."""
        number = key_of(key, unit.name, unit.method, self.places[unit.name])
        for generator in self._generators:
            generator.manual_seed(number)

    def key_in(self, batch: Mapping[str, object]) -> int | None:
        """The key of a micro batch; a RuntimeError where a unit draws and the micro batch has none."""
        key = batch.get(ENTRY)
        if key is None and self.drawing:
            raise RuntimeError(
                f"{self.drawing} draws random numbers, and the stepper gives units a micro batch without a key for "
                f"them; give them what DefaultStepper.entries returns"
            )
        assert key is None or isinstance(key, int), f"the entry '{ENTRY}' of a micro batch is a number on the host"
        return key


def drawing_plugin(run: "Run", slots: "Iterable[Filled]") -> str:
    """The label of a plugin whose supplier drops by a mask of its own, instead of one by the samples' keys; or ''."""
    for filled in slots:
        drops = getattr(filled.site.module, "dropout", 0) != 0
        if drops and filled.offer is not None and filled.offer.varies(filled.site, run):
            return filled.supplier
    return ""


def place_of(unit: Unit, plan: Plan, mesh: "Mesh", rank: int) -> int:
    """The rank's place among those that compute different parts of a unit.

    These are the ranks along mesh axes that divide what the unit takes, or heads. Those of one place hold copies.
    """
    axes = {**plan.context, **plan.activations}
    named = {axis for name in (*unit.inputs, *unit.optional) for axis in axes.get(name, ())}
    return mesh.place(rank, named, HEADS)
