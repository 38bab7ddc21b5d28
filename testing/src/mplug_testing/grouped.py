"""Products of experts, as trials of buffers call them. Every second token of a sequence goes to the second expert."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug.layout.plan import Init, Parameter
from mplug.model.slots.offers import Site
from mplug_nn import Experts

PRODUCT = "Experts.product"
EXPERTS = 2
WEIGHTS = {"up": ("expert", "mlp", "embed"), "down": ("expert", "embed", "mlp")}
"""The weights of `Experts` with their axes: the experts, the outputs, the inputs."""


def expert_site(embed: int, mlp: int) -> Site:
    """A site of experts of some widths, as a model has it."""
    with torch.device("meta"):
        experts = Experts(embed, mlp, EXPERTS, "gelu")
    entries = {name: Parameter(dims, Init("normal")) for name, dims in WEIGHTS.items()}
    return Site("blocks.*.part", PRODUCT, experts, "blocks.0.part", parameters=entries)


def of_weight(buffers: Mapping[str, Tensor], weight: str) -> dict[str, Tensor]:
    """The buffers that the product with a weight receives, from those of the slot."""
    prefix = f"{weight}_"
    return {name.removeprefix(prefix): one for name, one in buffers.items() if name.startswith(prefix)}


def routed(part: Mapping[str, slice], batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """(the tokens [M] of a part in the order of the part's experts, counts [e]), of tokens [batch, sequence]."""
    expert = (torch.arange(sequence) % EXPERTS).expand(batch, sequence)
    own = expert[part.get("batch", slice(None)), part.get("sequence", slice(None))].flatten()
    held = range(EXPERTS)[part.get("expert", slice(None))]
    tokens = torch.cat([(own == number).nonzero().flatten() for number in held])
    return tokens, torch.tensor([int((own == number).sum()) for number in held])


def after_groups(rows: Tensor) -> Tensor:
    """Rows [M, X] with two more, which belong to no group; large values, and other ones for another number of rows."""
    return torch.cat((rows, rows.new_full((2, rows.shape[1]), 1e3 * (1 + len(rows)))))
