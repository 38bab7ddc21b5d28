"""What an export writes: safetensors files, an index, config.json, and what the original folder has beside them."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import FORMATS, UsageError, write_whole
from mplug_huggingface_format.adapter_folder import WEIGHTS
from mplug_huggingface_format.config_file import ADAPTERS, CONFIG
from mplug_huggingface_format.folder import INDEX, WHOLE
from mplug_huggingface_format.kept import Kept, Published, published_in
from mplug_huggingface_format.model_config import config_of, describes, extended_config
from mplug_huggingface_format.scoring import class_with_scores, scoring
from mplug_pretrained import Conversion, Export, adapter_conversion, adapters_of, conversion, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Model, Run
    from mplug_pretrained import ExportOptions, ExportValues, Merge, RowNorms

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class FolderExport(Export):
    """What to write: the form, config.json, the type of tensors that the original folder does not have, shard size."""

    conversion: Conversion
    config: Mapping[str, Any]
    dtype: str
    shard_bytes: int
    original: Published | None = None
    fixed_dtype: str | None = None
    """The type of all tensors, if the user chose one."""
    whole: str = WHOLE
    """The name of the file with the tensors, if there is one file."""
    config_file: str = CONFIG
    merges: "Mapping[str, Merge]" = field(default_factory=dict)
    offsets: "Mapping[str, RowNorms]" = field(default_factory=dict)

    def write(self, folder: Path, values: "ExportValues") -> list[str]:
        """Write the files with tensors and, if there are several, their index; then the files beside them."""
        made = self.conversion
        kept = {tensor: self._kept(tensor) for tensor in made.public}
        sizes = {tensor: prod(made.shape(tensor)) * FORMATS[one.dtype].bytes for tensor, one in kept.items()}
        shards = self._shards(kept, sizes)

        def produce(tensor: str) -> "Tensor":
            return values(tensor, kept[tensor].dtype)

        for file, tensors in shards.items():
            entries = [(kept[tensor].name, kept[tensor].dtype, made.shape(tensor), tensor) for tensor in tensors]
            write_safetensors(folder / file, entries, produce)
        if list(shards) != [self.whole]:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {
                    kept[tensor].name: file for file, tensors in shards.items() for tensor in sorted(tensors)
                },
            }
            write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
        self._write_config(folder)
        return list(shards)

    def _kept(self, tensor: str) -> Kept:
        """The name, file and type of a public tensor in the export."""
        original = self.original.tensors.get(tensor) if self.original is not None else None
        kept = original or Kept(tensor, "", self.dtype)
        is_plain = FORMATS[kept.dtype].is_floating and FORMATS[kept.dtype].bytes > 1
        dtype = self.fixed_dtype or (kept.dtype if is_plain else self.dtype)
        return Kept(kept.name, kept.file, dtype)

    def _shards(self, kept: Mapping[str, Kept], sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """The tensors of each file: those of the original folder if it has all of them, else files of limited size."""
        found: dict[str, list[str]] = {}
        if all(one.file for one in kept.values()) and self.fixed_dtype is None:
            for tensor, one in kept.items():
                found.setdefault(one.file, []).append(tensor)
            return dict(sorted(found.items()))
        groups: list[list[str]] = [[]]
        filled = 0
        for tensor, size in sizes.items():
            if groups[-1] and filled + size > self.shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += size
        if len(groups) == 1:
            return {self.whole: groups[0]}
        names = (f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups)))
        return dict(zip(names, groups, strict=True))

    def _write_config(self, folder: Path) -> None:
        """Copy the files beside the weights, and write config.json."""
        if self.original is not None:
            shutil.copytree(self.original.files, folder, dirs_exist_ok=True)
            if self.config == self.original.config:
                return
        write_whole(folder / self.config_file, json.dumps(self.config, indent=2) + "\n")


def whole_model(run: "Run", model: "Model", options: "ExportOptions") -> FolderExport:
    """The export of the whole model, with its adapters merged into the weights."""
    original = published_in(options.kept) if options.kept is not None else None
    config = _config_json(run, original)  # first: it refuses by the names of settings, not of weights
    made = conversion(model).written()
    if made.names.scores is not None:
        config = scoring(config, made.names.scores.labels)
    weights = options.dtype or _dtype_of(config) or str(run.precision.weights)
    described = {**config, "dtype": weights}
    export = FolderExport(made, described, weights, options.shard_bytes, original, options.dtype, merges=model.merges)
    if original is not None and options.dtype is None and config == original.config:
        return replace(export, config=original.config)
    return export


def adapters_alone(run: "Run", model: "Model", options: "ExportOptions") -> FolderExport:
    """The export of the adapters alone, in the dtype of their masters: one file, whatever its size."""
    adapters, made = adapters_of(model), adapter_conversion(model)
    if made.names.scores is not None:
        class_with_scores(str(config_of(run.config)["architectures"][0]))  # refuses a model without such a class
    weights = options.dtype or str(run.precision.masters)
    files = FolderExport(made, adapters.config, weights, sys.maxsize, None, options.dtype, WEIGHTS, ADAPTERS)
    return replace(files, offsets=adapters.offsets)


def _config_json(run: "Run", original: Published | None) -> dict[str, Any]:
    """The config.json of the export, without a quantisation: the original one if it describes the run's model.

    A run may have other rotary positions than the original; their fields are then the run's.
    """
    if original is None:
        try:
            return config_of(run.config)
        except UsageError as error:
            raise UsageError(
                f"{error}; 'mplug generate', 'evaluate' and 'teach' read the checkpoints of the run as they are; for a "
                f"folder, train a model with settings that the config.json of its family has"
            ) from None
    path, fields = original.files / CONFIG, {**original.config}
    fields.pop("quantization_config", None)
    return fields if describes(run.config, path) else extended_config(run.config, fields, path)


def _dtype_of(config: dict[str, Any]) -> str | None:
    """The type of the weights that a config.json states, if it is one that can be written."""
    named = str(config.get("dtype", config.get("torch_dtype")))
    return named if named in DTYPES else None
