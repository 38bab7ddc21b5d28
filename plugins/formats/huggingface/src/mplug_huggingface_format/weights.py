"""Read boxes of public tensors from the files of a folder, after a check that the folder fits the model."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import Tensor

from mplug import FORMATS, RunError, UsageError, listed, some_names
from mplug_huggingface_format.decoders import WeightDecoder, weight_decoder
from mplug_huggingface_format.folder import PublicFolder, Stored
from mplug_huggingface_format.kept import Kept, keep_published
from mplug_pretrained import Conversion, FolderWeights, Link

if TYPE_CHECKING:
    from mplug_pretrained import Wanted

PLAIN = {one.code for one in FORMATS.values() if one.is_floating and one.bytes > 1}
"""The codes of the types of weights that are plain numbers."""
NAMES = {one.code: name for name, one in FORMATS.items()}
Shape = tuple[int, ...]


def _tensors_of(link: Link) -> list[str]:
    return [link.public(index) for index in link.fanned]


class PublicWeights(FolderWeights):
    """The public tensors of a model in a folder. `read` returns any box of one, decoded if it is quantised."""

    def __init__(self, folder: PublicFolder, conversion: Conversion) -> None:
        self.folder = folder
        public = {*conversion.public, *conversion.duplicates}
        names = conversion.names.public_names(folder.tensors.keys(), public)
        self._names = {public: name for name, public in names.items()}
        """The name in the folder of each tensor, by its public name."""
        self.conversion = conversion.present_in(self._names)
        self.links = self.conversion.links
        self._files = dict[str, Any]()
        self._stack = ExitStack()
        self._last: tuple[Any, Tensor] | None = None

    def __exit__(self, *error: object) -> None:
        self._last = None
        self._stack.close()

    # What the folder has.

    @property
    def present(self) -> Collection[str]:  # type: ignore[override]
        """The names of the stored tensors."""
        return self.stored.keys()

    @cached_property
    def decoder(self) -> WeightDecoder | None:
        """The decoder of a quantised folder."""
        if self.folder.quantisation is None:
            return None
        try:
            return weight_decoder(self.folder.quantisation)
        except ValueError as error:
            raise UsageError(f"cannot read '{self.folder.path}': {error}; use a folder with plain weights") from None

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """The tensors of the folder, by their public names."""
        return {public: self.folder.tensors[name] for public, name in self._names.items()}

    @cached_property
    def widest(self) -> torch.dtype:
        """A type that holds all values of the folder exactly; decoded values are in fp32."""
        wide = any(stored.code == FORMATS["float64"].code for stored in self.stored.values())
        return torch.float64 if wide else torch.float32

    def copies(self, name: str, wanted: "Wanted") -> tuple[Link, ...]:
        """The links of tensors in the folder that repeat a parameter; the user may exclude them."""
        links = self.conversion.copies.get(name, ()) if name in wanted.names else ()
        return tuple(link for link in links if any(self._is_copy(tensor, wanted) for tensor in _tensors_of(link)))

    def _is_copy(self, tensor: str, wanted: "Wanted") -> bool:
        return any(part in self.stored for part in self.parts(tensor)) and not wanted.allows(tensor)

    def parts(self, tensor: str) -> Mapping[str, Shape]:
        """The names and shapes of the stored tensors that a public tensor consists of."""
        shape = self.conversion.shape(tensor)
        encoded = self.decoder.stored(tensor, shape, self.stored) if self.decoder is not None else {}
        return encoded or {tensor: shape}

    def refuse_other_model(self, label: str, wanted: "Wanted") -> None:
        """Raise UsageError unless the folder has the wanted parameters, and nothing that the model does not use."""
        needed, known = dict[str, Shape](), set[str]()
        for tensor, targets in self.conversion.public.items():
            parts = self.parts(tensor)
            known |= parts.keys()
            if any(target.link.ours.tensor in wanted.names for target in targets):
                needed |= parts
        for name in self.conversion.copies:
            for tensor in (tensor for link in self.copies(name, wanted) for tensor in _tensors_of(link)):
                needed |= self.parts(tensor)
        known |= {part for tensor in self.conversion.duplicates for part in self.parts(tensor)}
        missing = [name for name in needed if name not in self.stored]
        unused = [
            name
            for name in self.stored
            if name not in known and not self.conversion.ignores(name, self.stored) and not wanted.allows(name)
        ]
        problems = [f"it lacks {some_names(missing)}"] if missing else []
        problems += [f"the model does not use {some_names(unused)}"] if unused else []
        problems += self._wrong(needed)
        if problems:
            remedy = "name them in checkpoint.pretrained.except, or use a checkpoint of this model"
            raise UsageError(f"{label} does not fit the model: {'; '.join(problems)}; {remedy}")

    def _wrong(self, needed: Mapping[str, Shape]) -> list[str]:
        """The first tensor whose shape or type is wrong."""
        encoded = self._encoded()
        for name, shape in needed.items():
            stored = self.stored.get(name)
            if stored is None:
                continue
            if stored.shape != shape:
                return [f"'{name}' has shape {stored.shape}, but the model has {shape}"]
            if name in encoded and NAMES[stored.code] not in encoded[name]:
                return [f"'{name}' has the type {stored.code}, but the quantised form has {listed(encoded[name])}"]
            if name not in encoded and stored.code not in PLAIN:
                return [f"'{name}' has the type {stored.code} without factors that decode it"]
        return []

    def _encoded(self) -> dict[str, tuple[str, ...]]:
        """The tensors that hold quantised values, and the types that they may have."""
        if self.decoder is None:
            return {}
        tensors = [*self.conversion.public, *self.conversion.duplicates]
        stored = (self.decoder.stored(tensor, self.conversion.shape(tensor), self.stored) for tensor in tensors)
        return {part: self.decoder.dtypes(part) for parts in stored for part in parts}

    def kept(self) -> dict[str, Kept]:
        """The tensors of the folder that hold a public tensor as it is, by public name."""
        return {
            tensor: Kept(self._key(tensor), self.stored[tensor].file, NAMES[self.stored[tensor].code])
            for tensor in self.conversion.public
            if tensor in self.stored
        }

    def keep(self, directory: Path) -> None:
        """Keep the files beside the weights, and the name, file and type of every tensor."""
        keep_published(self.folder.path, self.kept(), directory)

    # Reading.

    def read(self, tensor: str, start: Shape, shape: Shape) -> Tensor:
        """A box of a public tensor. The last box is remembered, because neighbouring regions often read it again."""
        key = (tensor, start, shape)
        if self._last is None or self._last[0] != key:
            self._last = None  # frees the memory before the next box is read
            self._last = (key, self._decoded(tensor, start, shape))
        return self._last[1]

    def _decoded(self, tensor: str, start: Shape, shape: Shape) -> Tensor:
        if self.decoder is None or not self.decoder.stored(tensor, self.conversion.shape(tensor), self.stored):
            return self._slice(tensor, start, shape)
        boxes = self.decoder.boxes(tensor, start, shape)
        return self.decoder.decode(tensor, start, shape, {name: self._slice(name, *box) for name, box in boxes.items()})

    def _slice(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A box of a stored tensor: the only place that reads values from files."""
        stored = self.stored[name]
        try:
            opened = self._opened(stored.file)
            key = self._key(name)
            if shape == stored.shape:
                found: Tensor = opened.get_tensor(key)
                return found
            box: Tensor = opened.get_slice(key)[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
            return box
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"cannot read '{name}' from '{self.folder.path / stored.file}': {error}") from error

    def _key(self, name: str) -> str:
        """The name of a tensor in its file."""
        return self._names.get(name, name)

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            opened = safetensors.safe_open(self.folder.path / file, framework="pt")
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]
