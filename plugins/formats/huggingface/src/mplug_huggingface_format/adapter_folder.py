"""The files of adapters alone, as the library PEFT reads and writes them.

adapter_config.json · adapter_model.safetensors
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError, some_names
from mplug_huggingface_format.config_file import ADAPTERS, read_json
from mplug_huggingface_format.folder import PublicFolder, Stored, read_tensors
from mplug_huggingface_format.weights import PublicWeights
from mplug_pretrained import adapter_conversion, adapters_of

if TYPE_CHECKING:
    from mplug import Model

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


def open_adapters(path: Path) -> PublicFolder:
    """Read adapter_config.json and the header of the tensors. Raises UsageError for a folder that is not of PEFT."""
    config = read_json(path / ADAPTERS)
    if not (path / WEIGHTS).is_file():
        pickled = f"has its tensors in '{PICKLE}', a pickle, which can run code when it is read"
        raise UsageError(
            f"'{path}' {pickled if (path / PICKLE).is_file() else f'has a {ADAPTERS} and no {WEIGHTS}'}; save the "
            f"adapters with PEFT's save_pretrained, or download '{WEIGHTS}'"
        )
    tensors = {name: Stored(WEIGHTS, code, shape) for name, (code, shape) in read_tensors(path, WEIGHTS).items()}
    return PublicFolder(path, config, tensors)


def checked(folder: PublicFolder, model: "Model") -> PublicWeights:
    """The adapters of a folder for a model; UsageError unless they are those of the model. Reads no values."""
    adapters, conversion = adapters_of(model), adapter_conversion(model)
    label = f"the adapters in '{folder.path}'"
    try:
        (adapters.check or partial(_refuse_other_fields, adapters.config))(folder.config, folder.tensors.keys())
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None
    conversion = conversion.present_in(folder.tensors)  # adapters of a language model have no scores
    missing = [name for name in conversion.public if name not in folder.tensors]
    unused = [name for name in folder.tensors if name not in conversion.public]
    wrong = [
        f"'{name}' has shape {folder.tensors[name].shape}, but the model needs {conversion.shape(name)}"
        for name in conversion.public
        if name in folder.tensors and folder.tensors[name].shape != conversion.shape(name)
    ]
    problems = [f"they lack {some_names(missing)}"] if missing else []
    problems += [f"the run has no place for {some_names(unused)}"] if unused else []
    if problems or wrong:
        raise UsageError(
            f"{label} are those of another base model or of other layers: {'; '.join([*problems, *wrong[:1]])}; use "
            f"the base model and the layers (adapters.*.targets) of the folder"
        )
    return PublicWeights(folder, conversion)


def _refuse_other_fields(own: Mapping[str, Any], fields: Mapping[str, Any], _tensors: Collection[str]) -> None:
    """Raise ValueError for the first field of a folder that differs from the run's; an absent one is null."""
    for name in sorted({*own, *fields}):
        if own.get(name) != fields.get(name):
            raise ValueError(
                f"have {name}={fields.get(name)!r} in {ADAPTERS}, and those of the run have {own.get(name)!r}; use the "
                f"settings of the folder"
            )
