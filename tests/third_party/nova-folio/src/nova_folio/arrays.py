"""The arrays of a folio: read box by box, and written from a checkpoint of mplug."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mplug import Model, Run, UsageError
from mplug_pretrained import Export, ExportValues, ExternalNames, ForeignCheckpoint, ForeignTensor, conversion_of
from nova_folio.page import Page, read_page, write_page

Shape = tuple[int, ...]


class Arrays(ForeignCheckpoint):
    """The arrays of a folder. They are mapped into memory: only the boxes that are read take memory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._arrays = {name: self._mapped(file) for name, file in read_page(folder).files.items()}
        self.tensors = {name: ForeignTensor(array.shape) for name, array in self._arrays.items()}

    def _mapped(self, file: str) -> "np.ndarray":
        try:
            array = np.load(self.path / file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"cannot read '{self.path / file}': {error}; copy the folder again") from None
        if array.dtype != np.float32:
            raise UsageError(f"'{self.path / file}' is no array of float32; copy the folder again")
        return array

    def read(self, tensor: str, start: Shape, shape: Shape, state: str = "weight", part: int = 0) -> Tensor:
        """A box of an array."""
        box = tuple(slice(low, low + length) for low, length in zip(start, shape, strict=True))
        return torch.from_numpy(self._arrays[tensor][box].copy())


class ArraysOfRun(Export):
    """An array for each parameter of a run, by mplug's own names."""

    def __init__(self, run: Run, model: Model) -> None:
        names = ExternalNames({name: name for name in model.placements})
        self.conversion = conversion_of(names, model.placements)
        self.merges, self.offsets = model.merges, {}
        settings = dict(run.config.resolved()["model"])
        self.family = settings.pop("name")
        self.settings = {name: settings[name] for name in type(run.config.model).model_fields}

    def write(self, folder: Path, values: ExportValues) -> list[str]:
        """A file for each tensor, and the page."""
        files = {name: f"{number:05d}.npy" for number, name in enumerate(self.conversion.public)}
        for name, file in files.items():
            np.save(folder / file, values(name, "float32").numpy())
        write_page(folder, Page(self.family, self.settings, files))
        return [*files.values()]
