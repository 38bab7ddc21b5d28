"""An export with quantised weights, by torchao: the library transformers reads, quantises and writes a whole model.

Only the weights of linear layers within the blocks are quantised; embeddings and the projection to the vocabulary stay
as they are. Activations are not quantised. The quantiser needs the memory of the whole model.
"""

import json
import logging
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mplug import UsageError
from mplug_huggingface_format.config_file import CONFIG
from mplug_huggingface_format.export import FolderExport
from mplug_pretrained import Export

if TYPE_CHECKING:
    from mplug_pretrained import ExportValues

GROUP = 32
"""Number of consecutive elements of a row of a weight that share a scale at 4 bits."""
OF_WEIGHTS = (".safetensors", ".safetensors.index.json")


class QuantizedExport(Export):
    """The export of a whole model whose weights torchao quantises: `int8` (a scale per row) or `int4` (per group)."""

    def __init__(self, plain: FolderExport, name: str) -> None:
        self.plain, self.name = plain, name
        self.conversion, self.merges, self.offsets = plain.conversion, plain.merges, plain.offsets

    def write(self, folder: Path, values: "ExportValues") -> list[str]:
        """Write the plain model beside the folder, and its quantised form into the folder."""
        with TemporaryDirectory(prefix=".plain-", dir=folder.parent) as temporary:
            plain = Path(temporary)
            self.plain.write(plain, values)
            quantise(plain, folder, self.name)
            for path in plain.iterdir():
                if not path.name.endswith(OF_WEIGHTS) and not (folder / path.name).exists():
                    shutil.copy(path, folder / path.name)
        return sorted(path.name for path in folder.glob("*.safetensors"))


def quantised(plain: FolderExport, name: str) -> QuantizedExport:
    """The quantised export. UsageError if a library is missing or does not know the model."""
    transformers = _libraries()
    architecture = plain.config["architectures"][0]
    if not hasattr(transformers, architecture):
        raise UsageError(
            f"--quantize {name}: the installed library transformers has no class '{architecture}'; export without "
            f"--quantize, or install a version that has it"
        )
    made = plain.conversion
    shapes = {tensor: made.shape(tensor) for tensor in made.public if ".layers." in tensor}
    uneven = [tensor for tensor, shape in shapes.items() if len(shape) == 2 and shape[1] % GROUP]
    if name == "int4" and uneven:
        raise UsageError(
            f"--quantize int4: the {shapes[uneven[0]][1]} columns of '{uneven[0]}' are no multiple of the {GROUP} that "
            f"share a scale; use --quantize int8"
        )
    return QuantizedExport(plain, name)


def _libraries() -> Any:
    try:
        import torchao  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
        import transformers  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"--quantize needs the libraries transformers and torchao: {error}; install them with pip install "
            f"'mplug-huggingface-format[quantize]'"
        ) from None
    return transformers


def quantise(plain: Path, folder: Path, name: str) -> None:
    """Write the quantised form of the model in the folder `plain` into another folder."""
    transformers = _libraries()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    owner = getattr(transformers, json.loads((plain / CONFIG).read_text())["architectures"][0])
    with warnings.catch_warnings(action="ignore"):  # notes of both libraries on their own future
        settings = transformers.TorchAoConfig(quant_type=_quantisation(name))
        model = owner.from_pretrained(plain, quantization_config=settings, dtype="auto", device_map="cpu")
        model.save_pretrained(folder)


def _quantisation(name: str) -> Any:
    import torch
    from torchao.quantization import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if name == "int8":
        return Int8WeightOnlyConfig(version=2)
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
