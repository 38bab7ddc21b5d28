"""The tensors of a universal checkpoint: `zero/NAME/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`.

DeepSpeed's converter (`deepspeed.checkpoint.ds_to_universal`) has joined the ranks. From stage 3 it writes flat values
without shapes; the model files that it copies have the shapes.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from mplug import UsageError
from mplug_deepspeed_format.pickles import damaged, load
from mplug_deepspeed_format.rank_files import MODEL, UNIVERSAL
from mplug_deepspeed_format.saved import Saved, Shape
from mplug_deepspeed_format.zero_files import WEIGHT, Content, rest, unwrapped

STEP, FP32 = "step", "fp32"
OF_OPTIMIZER = "optimizer_state.pt"


def read_universal(path: Path) -> Content:
    """The tensors of a universal checkpoint. UsageError for a folder without weights, or with damaged files."""
    models = _model_files(path)
    first = models[min(models)] if models else {}
    shapes = {name: tuple(size) for group in first.get("param_shapes") or () for name, size in group.items()}
    optimizer = load(path / UNIVERSAL / OF_OPTIMIZER) if (path / UNIVERSAL / OF_OPTIMIZER).is_file() else {}
    step, tensors = _step_of(optimizer), dict[str, Saved]()
    for folder in sorted((path / UNIVERSAL).iterdir()):
        if folder.is_dir():
            tensors[folder.name] = _tensor(folder, shapes.get(folder.name), step)
    if not tensors:
        raise UsageError(f"'{path / UNIVERSAL}' has no parameters; copy the checkpoint again")
    if absent := sorted(shapes.keys() - tensors.keys()):
        raise UsageError(f"'{path / UNIVERSAL}' lacks the parameter '{absent[0]}'; copy the checkpoint again")
    tensors |= {name: one for name, one in (rest(models) if models else {}).items() if name not in tensors}
    tensors |= {alias: tensors[name] for alias, name in (first.get("shared_params") or {}).items() if name in tensors}
    for name, one in tensors.items():
        if fault := one.fault():
            raise UsageError(f"'{path / UNIVERSAL / name}' has {fault}; copy the checkpoint again")
    names, facts = unwrapped(list(tensors)), {name: value for name, value in first.items() if name != "module"}
    return Content({names[name]: one for name, one in tensors.items()}, facts, tuple(optimizer.get("param_groups", ())))


def _model_files(path: Path) -> dict[int, dict[str, Any]]:
    """The model files of the data-parallel ranks; the files of one tensor-parallel rank describe shapes of parts."""
    hits = [hit for file in sorted(path.iterdir()) if (hit := MODEL.fullmatch(file.name))]
    if len({hit["part"] for hit in hits}) > 1:
        return {}
    return {int(hit["data"] or 0): load(path / hit.string) for hit in hits}


def _step_of(optimizer: Mapping[str, Any]) -> float | None:
    """The number of steps in the optimizer's file, which the converter of stage 3 writes instead of 'step.pt'."""
    base = optimizer.get("optimizer_state_dict") or {}
    found = next((one[STEP] for one in base.get("state", {}).values() if STEP in one), None)
    if found is None:
        found = next((one[STEP] for one in optimizer.get("param_groups", ()) if STEP in one), None)
    return None if found is None else float(found)


def _tensor(folder: Path, shape: Shape | None, step: float | None) -> Saved:
    if not (folder / f"{FP32}.pt").is_file():
        raise UsageError(f"'{folder}' lacks '{FP32}.pt'; copy the checkpoint again")
    pieces, numbers = dict[str, list[Tensor]](), dict[str, float]()
    for file in sorted(folder.glob("*.pt")):
        found = load(file)
        values = found["param"] if isinstance(found, dict) else found
        if isinstance(values, Tensor) and values.dim() > 0:
            if file.stem == FP32 and isinstance(found, dict):
                shape = tuple(values.shape)
            pieces[WEIGHT if file.stem == FP32 else file.stem] = [values.reshape(-1)]
        else:
            numbers[file.stem] = float(values)
    if WEIGHT not in pieces:
        raise damaged(folder / f"{FP32}.pt", "it has no tensor")
    if step is not None and len(pieces) > 1:
        numbers.setdefault(STEP, step)
    whole = pieces[WEIGHT][0]
    if shape is None:
        raise UsageError(
            f"'{folder}' has {whole.numel()} flat values, and no '..._model_states.pt' of the checkpoint says which "
            f"shape they have; copy the checkpoint with these files"
        )
    return Saved(shape, {key: values for key, values in pieces.items() if values[0].numel() == prod(shape)}, numbers)
