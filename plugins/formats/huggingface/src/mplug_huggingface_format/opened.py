"""A folder with which a run begins: opened by rank 0, and read by each rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_huggingface_format.config_file import ADAPTERS, CONFIG
from mplug_huggingface_format.folder import PublicFolder, open_public
from mplug_huggingface_format.weights import PublicWeights
from mplug_pretrained import PublishedFolder, conversion

if TYPE_CHECKING:
    from mplug import Model


@dataclass(frozen=True)
class OpenedFolder(PublishedFolder):
    """A folder with a config.json and safetensors files, whose headers are read."""

    folder: PublicFolder

    @property
    def path(self) -> Path:  # type: ignore[override]
        """The folder."""
        return self.folder.path

    def weights(self, model: "Model") -> PublicWeights:
        """The weights for a model, by its external names."""
        _refuse_adapters(self.path, model)
        return PublicWeights(self.folder, conversion(model))


def open_folder(path: Path) -> OpenedFolder:
    """Read config.json and the headers of a folder. UsageError if it is damaged."""
    return OpenedFolder(open_public(path))


def _refuse_adapters(path: Path, model: "Model") -> None:
    """Raise UsageError if a folder has adapters that the run would not apply."""
    own = model.adapters.path if model.adapters is not None else None
    if (path / ADAPTERS).exists() and (own is None or own.resolve() != path.resolve()):
        raise UsageError(
            f"checkpoint.pretrained '{path}' has '{ADAPTERS}' beside {CONFIG}: adapters, which would not be applied to "
            f"the model; move them to a folder of their own, and name it in the settings of the plugin that reads "
            f"adapters"
        )
