"""Runs the units of a plan one after another."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from mplug.layout.plan import Unit

Instead = Mapping[str, Callable[..., object]]
"""Functions that run instead of some units, by the names of the units."""
AS_THEY_ARE: Instead = MappingProxyType({})


def run_units(
    module: nn.Module,
    units: Iterable[Unit],
    batch: Mapping[str, Tensor],
    before: Callable[[Unit], None] | None = None,
    instead: Instead = AS_THEY_ARE,
) -> dict[str, Tensor]:
    """Run units in order on a micro batch's entries; returns the entries and all activations.

    `before` is called before each unit.
    """
    values = dict(batch)
    for unit in units:
        if before is not None:
            before(unit)
        part = module.get_submodule(unit.name)
        own = part if unit.method == "forward" else getattr(part, unit.method)  # calling `part` runs forward hooks
        run = instead.get(unit.name, own)
        optional = {name: values[name] for name in unit.optional if name in values}
        outputs = run(*(values[name] for name in unit.inputs), **optional)
        values |= zip(unit.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
    return values
