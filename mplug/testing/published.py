"""Whether a family's external names and config.json say the same as its plan."""

from typing import TYPE_CHECKING
from unittest import SkipTest

import torch
from torch import Tensor

from mplug.checkpoint.public_weights import conversion
from mplug.checkpoint.transfer import Read, fill_ours, fill_theirs
from mplug.errors import UsageError
from mplug.layout.mesh import Mesh
from mplug.registry.public import FORMS, forms_of
from mplug.registry.public_export import public_config_of
from mplug.run.run import Run
from mplug.testing.suite import Fault, require

if TYPE_CHECKING:
    from mplug.model.model import Model


def require_published(run: Run, model: "Model") -> None:
    """Raise Fault unless every element of the model has one place in a published checkpoint, and the reverse.

    SkipTest if the family has no published form, or none for this config.
    """
    plugin = next(one for one in run.config.chosen if one.section == ("model",)).plugin
    if model.plan.external is None:
        require(not forms_of(plugin), f"it has '{FORMS}', but its plan has no external names (Plan.external)")
        raise SkipTest("its plan has no external names, so it has no published form")
    try:
        public_config_of(run.config)
    except UsageError as error:
        raise SkipTest(f"{error}") from None
    model.place(Mesh.of([], 1), None)
    try:
        made = conversion(model)
    except UsageError as error:
        raise Fault(f"{error}") from None
    lost = sorted(made.absent & set(model.placements))
    require(not lost, f"its published form has no place for {lost}, so an export would lose it")
    first, public = 0, dict[str, Tensor]()
    for tensor in made.public:
        shape = torch.Size(made.shape(tensor))
        public[tensor] = torch.arange(first, first + shape.numel(), dtype=torch.float64).view(shape)
        first += shape.numel()
    ours = dict[str, Tensor]()
    for name, links in made.links.items():
        ours[name] = torch.full(links[0].ours.shape, -1.0, dtype=torch.float64)
        fill_ours(links, (0,) * ours[name].dim(), ours[name], _reader(public))
        require(bool((ours[name] >= 0).all()), f"its external names leave elements of '{name}' out")
    for tensor, original in public.items():
        found = torch.full_like(original, -1.0)
        fill_theirs(made.public[tensor], found, _reader(ours))
        require(torch.equal(found, original), f"its external names give elements of '{tensor}' to several parameters")


def _reader(tensors: dict[str, Tensor]) -> Read:
    """Reads boxes of tensors in memory."""

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    return read
