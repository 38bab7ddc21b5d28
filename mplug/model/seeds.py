"""What the host asks of the package that seeds torch's generators, for kernels that draw random numbers themselves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from mplug.registry.provided import needed, provided

if TYPE_CHECKING:
    from mplug.layout.plan import Unit
    from mplug.model.model import Model
    from mplug.run.run import Run


class Seeds(Protocol):
    """Seeds the generators of a rank before each unit, by the key of the micro batch."""

    def key_in(self, batch: Mapping[str, object]) -> int | None:
        """The key of a micro batch; RuntimeError if a kernel draws and the micro batch has no key."""

    def begin(self, unit: "Unit", key: int) -> None:
        """Seed the generators for a unit."""


def seeds_of(run: "Run", model: "Model") -> Seeds | None:
    """The seeds of a model; None if no package seeds generators. UsageError if a kernel of the run then draws."""
    drawing = (one for one in model.slots if one.offer is not None and one.offer.varies(one.site, run))
    first = next(drawing, None)
    found = provided("steps") if first is None else needed("steps", f"the dropout of {first.supplier}", "mplug-steps")
    return None if found is None else found.seeds(run, model, "" if first is None else first.supplier)
