"""The files of adapters alone, as the library PEFT reads and writes them: a new run begins with them.

adapter_config.json · adapter_model.safetensors
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mplug.checkpoint.public_folder import PublicFolder, Stored, read_tensors, some
from mplug.checkpoint.public_weights import PublicWeights
from mplug.checkpoint.transfer import fill_ours
from mplug.config.public import read_json
from mplug.errors import UsageError
from mplug.gradients.region import region
from mplug.layout.conversion import Conversion, conversion_of
from mplug.model.adapters import Adapters, RowNorms, squares_of_rows
from mplug.model.pieces import held_values, write_weights

if TYPE_CHECKING:
    from mplug.contracts import Piece
    from mplug.model.model import Model
    from mplug.model.pieces import Held
    from mplug.run.run import Run

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
UNPUBLISHED = "the adapters of this run have no form that PEFT reads:"


def adapters_of(model: "Model") -> Adapters:
    """The published form of a model's adapters; UsageError if it has none."""
    if model.adapters is None:
        raise UsageError(
            "this run has no adapters: no plugin of it attaches any; train with --adapt, or use --to hf for the whole "
            "model"
        )
    if model.adapters.names is None:
        raise UsageError(f"{UNPUBLISHED} {model.adapters.reason}")
    return model.adapters


def adapter_conversion(model: "Model") -> Conversion:
    """The published form of a whole model's adapters."""
    adapters = adapters_of(model)
    assert adapters.names is not None
    prefixes = tuple(f"{name}." for name in model.attached)
    placements = {name: one for name, one in model.placements.items() if name.startswith(prefixes)}
    others = [n for n, one in model.placements.items() if one.parameter.trainable and not n.startswith(prefixes)]
    if others:
        raise UsageError(f"{UNPUBLISHED} the run also trains {some(others)} of the model itself")
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


def open_adapters(path: Path) -> PublicFolder:
    """Read adapter_config.json and the header of the tensors. Raises UsageError for a folder that is not of PEFT."""
    config = read_json(path / CONFIG)
    if not (path / WEIGHTS).is_file():
        pickled = f"has its tensors in '{PICKLE}', a pickle, which can run code when it is read"
        raise UsageError(
            f"'{path}' {pickled if (path / PICKLE).is_file() else f'has a {CONFIG} and no {WEIGHTS}'}; save the "
            f"adapters with PEFT's save_pretrained, or download '{WEIGHTS}'"
        )
    tensors = {name: Stored(WEIGHTS, code, shape) for name, (code, shape) in read_tensors(path, WEIGHTS).items()}
    return PublicFolder(path, config, tensors)


def refuse_other_adapters(model: "Model") -> None:
    """Raise UsageError unless the folder with which a new run begins has the adapters of the model. Reads headers."""
    adapters = model.adapters
    if adapters is not None and adapters.path is not None:
        _checked(open_adapters(adapters.path), model)


def _checked(folder: PublicFolder, model: "Model") -> PublicWeights:
    adapters, conversion = adapters_of(model), adapter_conversion(model)
    label = f"the adapters in '{folder.path}'"
    try:
        (adapters.check or partial(_refuse_other_fields, adapters.config))(folder.config, folder.tensors.keys())
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None
    missing = [name for name in conversion.public if name not in folder.tensors]
    unused = [name for name in folder.tensors if name not in conversion.public]
    wrong = [
        f"'{name}' has shape {folder.tensors[name].shape}, but the model needs {conversion.shape(name)}"
        for name in conversion.public
        if name in folder.tensors and folder.tensors[name].shape != conversion.shape(name)
    ]
    problems = [f"they lack {some(missing)}"] if missing else []
    problems += [f"the run has no place for {some(unused)}"] if unused else []
    if problems or wrong:
        raise UsageError(
            f"{label} are those of another base model or of other layers: {'; '.join([*problems, *wrong[:1]])}; use "
            f"the base model and the layers (adapters.*.targets) of the folder"
        )
    return PublicWeights(folder, conversion)


def _refuse_other_fields(own: "Mapping[str, Any]", fields: "Mapping[str, Any]", _tensors: "Collection[str]") -> None:
    """Raise ValueError for the first field of a folder that differs from the run's; an absent one is null."""
    for name in sorted({*own, *fields}):
        if own.get(name) != fields.get(name):
            raise ValueError(
                f"have {name}={fields.get(name)!r} in {CONFIG}, and those of the run have {own.get(name)!r}; use the "
                f"settings of the folder"
            )


def load_adapters(run: "Run", model: "Model", pieces: "Iterable[Piece]") -> None:
    """Fill the adapters of a new run from the folder that they name, if they name one. Collective.

    Call it after the weights of the model are loaded.
    """
    adapters = model.adapters
    if adapters is None or adapters.path is None:
        return
    pieces = list(pieces)
    held = {one.name: one for one in held_values(model, pieces)}
    norms = {name: _norms(run, model, held, rows) for name, rows in adapters.offsets.items()}
    with _checked(open_adapters(adapters.path), model) as weights:
        for name, links in weights.conversion.links.items():
            for box in held[name].placement.boxes(run.rank) if name in held else ():
                values = region(held[name].values, box)
                fill_ours(links, box.start, values, weights.read)
                if name in norms:
                    values -= norms[name].to(values)[box.start[0] : box.start[0] + box.shape[0]]
    write_weights(pieces)
    model.weights_written()


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
