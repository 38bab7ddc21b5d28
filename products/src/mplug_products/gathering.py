"""The weights for which a strategy gathers copies in each pass, and why it gathers the other weights themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.errors import UsageError
from mplug.model.model import Model
from mplug.model.slots.selection import Wider
from mplug.run.run import Run
from mplug_products.gathered_form import GatheredForm
from mplug_products.slot_buffers import held
from mplug_products.weight_product import ProductModule
from mplug_sharding import GatheredPlacement

SHARED, NO_PRODUCT = "several modules read it", "no product in a slot reads it"
NO_COPIES = "its product reads no copies"


@dataclass(frozen=True, eq=False)
class GatheredCopies:
    """The copies of one weight that ranks gather instead of it. `like` are the whole copies, without memory."""

    module: ProductModule
    slot: str
    attribute: str
    form: GatheredForm
    supplier: str
    like: tuple[Tensor, ...]
    part_bytes: int
    """Bytes that a rank sends each time the weight is gathered, padding included."""

    def largest(self, rows: Tensor) -> Tensor:
        """rows [o, I] of this rank -> [k], of which `cast` needs the elementwise maximum over the ranks."""
        return self.form.largest(rows, self._buffers)

    def cast(self, rows: Tensor, largest: Tensor) -> tuple[Tensor, ...]:
        """Rows [o, I] of this rank, padded with zeros, and the maximum over the ranks [k] -> the copies of the rows."""
        return self.form.cast(rows, largest, self._buffers)

    def hold(self, copies: tuple[Tensor, ...]) -> None:
        """Let the product read whole copies from now on; with none, it casts the weight itself."""
        setattr(self.module, self.attribute, copies)

    @property
    def _buffers(self) -> Mapping[str, Tensor]:
        return held(self.module, self.slot)


def gathered_copies(run: Run, model: Model) -> dict[str, GatheredCopies | str]:
    """What ranks gather of each parameter whose placement is gathered `as_copies`.

    These are copies; or the parameter itself, for the reason that the string states as a clause. The answer follows
    from the plan, the slots and the layout, so it is the same on all ranks that gather together.
    """
    holders: dict[int, list[tuple[str, Any, str]]] = {}
    for name, module in model.module.named_modules():
        for attribute, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append((name, module, attribute))
    wider, found = Wider(model.slots), dict[str, GatheredCopies | str]()
    for name, parameter in model.parameters().items():
        placement = model.placements[name]
        if isinstance(placement, GatheredPlacement) and placement.as_copies:
            found[name] = _of_parameter(run, model, placement, holders[id(parameter)], wider)
    return found


def _of_parameter(
    run: Run, model: Model, placement: GatheredPlacement, holders: list[tuple[str, Any, str]], wider: Wider
) -> GatheredCopies | str:
    name, module, attribute = holders[0]
    if len(holders) > 1:
        return SHARED
    if not isinstance(module, ProductModule) or attribute not in module.CASTS:
        return NO_PRODUCT
    product, slot = module.product_of(attribute)
    filled = next((one for one in model.slots if (one.site.name, one.site.slot) == (name, slot)), None)
    if filled is None or filled.offer is None:
        return NO_COPIES
    form = product.gathered_form()
    if isinstance(form, str):
        return form
    if replacing := next(wider.replacing(filled.site), None):
        return f"{replacing[0]} replaces {replacing[1]} and reads it"
    if reason := module.other_readers(attribute):
        return reason
    each = placement.rows_each
    if each % form.rows_multiple:
        return f"a rank has {each} of its rows, and the copies need a multiple of {form.rows_multiple}"
    like, parts = _without_memory(run, placement, form, held(module, slot), filled.supplier)
    part_bytes = sum(part.nbytes for part, travels in zip(parts, form.along_rows, strict=True) if travels)
    return GatheredCopies(module, slot, module.CASTS[attribute], form, filled.supplier, like, part_bytes)


def _without_memory(
    run: Run, placement: GatheredPlacement, form: GatheredForm, buffers: Mapping[str, Tensor], plugin: str
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The copies of the whole weight and those of a rank's rows; ValueError if they do not fit each other."""
    rows, *rest = placement.gathered_shape(run.rank)
    size, dtype = run.mesh.axes[placement.axis].size, run.precision.weight_dtype
    with FakeTensorMode():
        given = {name: torch.empty(one.shape, dtype=one.dtype, device=run.device) for name, one in buffers.items()}
        whole, part = (
            _cast(form, torch.zeros(n, *rest, dtype=dtype, device=run.device), given)
            for n in (rows, placement.rows_each)
        )
    fits = len(whole) == len(part) == len(form.along_rows) and all(
        _fits(one, of_part, size if travels else 0)
        for one, of_part, travels in zip(whole, part, form.along_rows, strict=True)
    )
    if not fits:
        shapes = [[tuple(one.shape) for one in copies] for copies in (whole, part)]
        raise ValueError(
            f"{plugin}: the gathered form of '{placement.name}' declares along_rows={form.along_rows}, and its copies "
            f"of {rows} rows and of {placement.rows_each} rows have the shapes {shapes[0]} and {shapes[1]}"
        )
    return whole, part


def _cast(form: GatheredForm, rows: Tensor, buffers: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return form.cast(rows, form.largest(rows, buffers), buffers)


def _fits(whole: Tensor, part: Tensor, ranks: int) -> bool:
    """Whether a copy of a rank's rows is its part of a whole copy; with no `ranks`, whether it is the whole."""
    if whole.dtype != part.dtype or not ranks:
        return (whole.dtype, whole.shape) == (part.dtype, part.shape)
    return whole.dim() > 0 and part.shape == (-(-len(whole) // ranks), *whole.shape[1:])


def refuse_idle_copies(run: Run, model: Model) -> None:
    """Raise UsageError if a strategy gathers copies and no product of the whole model has any."""
    found = gathered_copies(run, model)
    reasons = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if len(model.stages.units) > 1 or len(reasons) < max(1, len(found)):
        return
    order = {SHARED: 0, NO_PRODUCT: 0, NO_COPIES: 1}
    name = max(reasons, key=lambda one: (order.get(reasons[one], 2), model.placements[one].numel))
    axis = model.placements[name].gathered_along
    owners = {own.name: label for label, axes in run.hooks.each("mesh_axes", config=run.config) for own in axes}
    label = owners.get(axis or "", "the layout")
    raise UsageError(
        f"{label} is set to gather copies of weights, and no product of this run reads copies that can be gathered: "
        f"'{name}' must be gathered as it is, because {reasons[name]}; let {label} gather weights, or choose products "
        f"whose copies can be gathered (mplug_nn.GatheredForm) for kernels.linear"
    )
