"""The adapters of a model alone: their published form, and the folder with which a new run begins.

The format that `Adapters.format` names reads and writes such folders.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from mplug.errors import UsageError, some_names
from mplug.gradients.region import region
from mplug.model.pieces import held_values, write_weights
from mplug_pretrained.adapters import Adapters, RowNorms, squares_of_rows
from mplug_pretrained.expansion import Conversion, conversion_of
from mplug_pretrained.formats import format_named
from mplug_pretrained.published import FolderWeights
from mplug_pretrained.transfer import fill_ours

if TYPE_CHECKING:
    from mplug.contracts.optimizer import Piece
    from mplug.model.model import Model
    from mplug.model.pieces import Held
    from mplug.run.run import Run

UNPUBLISHED = "the adapters of this run have no form of their own:"


def adapters_of(model: "Model") -> Adapters:
    """The published form of a model's adapters, with a head of scores if it has one; UsageError if there is no form."""
    if model.adapters is None:
        raise UsageError(
            "this run has no adapters: no plugin of it attaches any; train with --adapt, or name the format of a whole "
            "model with --to"
        )
    if model.adapters.names is None:
        raise UsageError(f"{UNPUBLISHED} {model.adapters.reason}")
    adapters: Adapters = model.adapters
    scores = None if model.plan.external is None else model.plan.external.scores
    if scores is None:
        return adapters
    if adapters.scored is None:
        raise UsageError(f"{UNPUBLISHED} they have none beside the scores '{scores.weight}', which the run also trains")
    return adapters.scored(scores)


def adapter_conversion(model: "Model") -> Conversion:
    """The published form of a whole model's adapters."""
    adapters = adapters_of(model)
    assert adapters.names is not None
    prefixes = tuple(f"{name}." for name in model.attached)
    placements = {name: one for name, one in model.placements.items() if name.startswith(prefixes)}
    others = [n for n, one in model.placements.items() if one.parameter.trainable and not n.startswith(prefixes)]
    if others:
        raise UsageError(f"{UNPUBLISHED} the run also trains {some_names(others)} of the model itself")
    try:
        return conversion_of(adapters.names, placements)
    except ValueError as error:  # a module of another plugin, for example
        raise UsageError(f"{UNPUBLISHED} {error}") from None


def unpublished(model: "Model") -> str:
    """Why the adapters alone cannot be exported; empty if they can, and for a model without adapters."""
    try:
        if model.attached and model.adapters is not None:
            adapter_conversion(model)
    except UsageError as error:
        return str(error).removeprefix(f"{UNPUBLISHED} ")
    return ""


def refuse_other_adapters(model: "Model") -> None:
    """Raise UsageError unless the folder with which a new run begins has the adapters of the model. Reads headers."""
    adapters = model.adapters
    if adapters is not None and adapters.path is not None:
        _opened(model, adapters)


def _opened(model: "Model", adapters: Adapters) -> FolderWeights:
    """The adapters of the folder with which a new run begins; UsageError if they are not those of the model."""
    assert adapters.path is not None
    found: FolderWeights = format_named(adapters.format).format.open_adapters(adapters.path, model)
    return found


def load_adapters(run: "Run", model: "Model", pieces: "Iterable[Piece]") -> None:
    """Fill the adapters of a new run from the folder that they name, if they name one. Collective.

    Call it after the weights of the model are loaded.
    """
    pieces = list(pieces)
    if fill_adapters(run, model, held_values(model, pieces)):
        write_weights(pieces)
        model.weights_written()


def fill_adapters(run: "Run", model: "Model", values: "Iterable[Held]") -> bool:
    """Fill values of this rank from the folder of adapters that the config names; False if it names none. Collective.

    `values` are those of all parameters of this rank, with the weights of the model.
    """
    adapters = model.adapters
    if adapters is None or adapters.path is None:
        return False
    held = {one.name: one for one in values}
    norms = {name: _norms(run, model, held, rows) for name, rows in adapters.offsets.items()}
    with _opened(model, adapters) as weights:
        for name, links in weights.links.items():
            for box in held[name].placement.boxes(run.rank) if name in held else ():
                values = region(held[name].values, box)
                fill_ours(links, box.start, values, weights.read)
                if name in norms:
                    values -= norms[name].to(values)[box.start[0] : box.start[0] + box.shape[0]]
    return True


def _norms(run: "Run", model: "Model", held: "Mapping[str, Held]", rows: RowNorms) -> torch.Tensor:
    """The norms of rows of a weight, on every rank, from the boxes of all ranks. Collective."""
    found = torch.zeros(rows.length, dtype=torch.float64, device=run.device)
    one = held.get(rows.weight)
    for box in one.placement.boxes(run.rank) if one is not None else ():
        first, last = max(box.start[0], rows.start), min(box.start[0] + box.shape[0], rows.start + rows.length)
        if one is not None and first < last and run.rank == min(box.copies):
            own = region(one.values, box)[first - box.start[0] : last - box.start[0]]
            found[first - rows.start : last - rows.start] += squares_of_rows(own)
    dtype = torch.promote_types(one.values.dtype, torch.float32) if one is not None else model.master_dtype
    return run.summed(found).sqrt().to(dtype)
