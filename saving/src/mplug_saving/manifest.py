"""The schema of a checkpoint's manifest, and the check that chunks cover their tensors. Imports pydantic, not torch."""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from mplug.errors import LONGEST_TEXT
from mplug.precisions.dtypes import FORMATS
from mplug_saving.coverage import uncovered
from mplug_saving.names import MANIFEST
from mplug_saving.reading import LARGEST, MOST_DIMS, Expected, parse_json

FORMAT = 2
"""The version of the format that this version of mplug writes and reads."""
DEEPEST = 100
"""Maximum nesting of a plugin's state."""


class OtherFormat(ValueError):
    """The manifest has a format that this version of mplug does not read."""


def _plain(value: Any, number_is_valid: Callable[[float], bool]) -> Any:
    """Return `value`. ValueError if it is nested more than DEEPEST levels deep, or contains an invalid number."""
    pending = [(value, 0)]
    while pending:
        inner, depth = pending.pop()
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if isinstance(inner, float) and not number_is_valid(inner):
            raise ValueError(f"it contains the number {inner}")
        if isinstance(inner, dict):
            pending += [(key, depth) for key in inner]
        if isinstance(inner, dict | list):
            pending += [(part, depth + 1) for part in (inner.values() if isinstance(inner, dict) else inner)]
        if isinstance(inner, str) and not inner.isascii():
            inner.encode()  # fails for an unpaired surrogate
    return value


def _dtype_name(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"'{name}' is not a dtype that a checkpoint can hold")
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it contains characters that a terminal cannot show")
    return text


def _of_plugin(value: Any) -> Any:
    return _plain(value, lambda _: True)


def _of_host(value: Any) -> Any:
    return _plain(value, math.isfinite)


def _of_config(value: Any) -> Any:
    return _plain(value, lambda number: not math.isnan(number))  # a field of a plugin may be infinite


Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Dims = Annotated[list[Count], Field(max_length=MOST_DIMS)]
Dtype = Annotated[str, AfterValidator(_dtype_name)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT), AfterValidator(_printable)]
"""A line that commands print. `errors.printable` converts any text to one."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$", max_length=200)]
"""The name of a file in the checkpoint's own folder."""
TensorName = Annotated[str, Field(min_length=1)]
Section = Annotated[dict[str, Any] | None, BeforeValidator(_of_config)]


class SavedFile(TypedDict):
    """A file of a checkpoint: its size, and its CRC-32."""

    bytes: Count
    crc32: Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]


class SavedTensor(TypedDict):
    """A logical tensor and its chunks: the file, start and shape of each chunk."""

    shape: Dims
    dtype: Dtype
    chunks: Annotated[list[tuple[FileName, Dims, Dims]], Field(min_length=1)]


class SavedPlugin(TypedDict):
    """A plugin of the run, as in the record of the run."""

    plugin: Text
    distribution: Text
    version: Text
    source: NotRequired[Text]


class Provenance(TypedDict):
    """The versions and plugins that made a checkpoint."""

    mplug: Text
    torch: Text
    plugins: list[SavedPlugin]
    plugins_hash: NotRequired[Text]


class SavedTrainer(TypedDict):
    """The field of the section `trainer` that a resumed run computes with."""

    steps: Annotated[int, Field(strict=True, ge=1, le=LARGEST)]


class SavedOptimizer(TypedDict):
    """The field of the section `optimizer` that a resumed run computes with."""

    lr: Annotated[float, Field(allow_inf_nan=False)]


class SavedChange(TypedDict):
    """A change on resume: a message about a version, or a field with its old and new value."""

    step: Count
    version: NotRequired[Text]
    field: NotRequired[Text]
    old: NotRequired[Annotated[Any, BeforeValidator(_of_config)]]
    new: NotRequired[Annotated[Any, BeforeValidator(_of_config)]]
    allowed_by_user: NotRequired[bool]


def _complete_change(change: SavedChange) -> SavedChange:
    if not (change.get("version") or {"field", "old", "new"} <= change.keys()):
        raise ValueError("a change must have 'version', or 'field', 'old' and 'new'")
    return change


class Facts(TypedDict):
    """A manifest without its files and tensors. The data of plugins (`loader`, `states`) is plain data of any form.

    `imported` is the form and the folder of the foreign checkpoint that the host has imported.
    """

    format: int
    step: Count
    saved: Text
    layout: Text
    world_size: Count
    samples: Count
    tokens: Count
    loader: Annotated[dict[str, Any], BeforeValidator(_of_plugin)]
    states: Annotated[dict[str, Any], BeforeValidator(_of_plugin)]
    loss_scale: NotRequired[Annotated[dict[str, Any], BeforeValidator(_of_plugin)]]
    provenance: Provenance
    config: NotRequired[dict[str, Section]]
    changes: NotRequired[list[Annotated[SavedChange, AfterValidator(_complete_change)]]]
    varies: NotRequired[dict[Text, Text] | None]
    data_fingerprint: NotRequired[Annotated[Any, BeforeValidator(_of_host)]]
    imported: NotRequired[Text]


Files = Annotated[dict[FileName, SavedFile], Field(min_length=1)]
Tensors = Annotated[dict[TensorName, SavedTensor], Field(min_length=1)]


class Head(Facts):
    """A manifest without its tensors."""

    files: Files


class Manifest(Head):
    """The plain data of a checkpoint."""

    tensors: Tensors


class Contents(TypedDict):
    """The entries of a manifest about some of its files: these files, and the tensors with their chunks in them."""

    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]


class _Settings(TypedDict):
    trainer: SavedTrainer
    optimizer: SavedOptimizer


_SCHEMA, _HEAD, _SETTINGS = TypeAdapter(Manifest), TypeAdapter(Head), TypeAdapter(_Settings)
_TENSORS: TypeAdapter[Mapping[str, SavedTensor]] = TypeAdapter(Tensors)


@dataclass(frozen=True)
class TensorTable:
    """The validated tensors of a manifest, as its text has them, and the bytes that their chunks need in each file.

    Later saves with the same layout write the same table.
    """

    text: str
    needed: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "TensorTable":
        """The table of plain data; ValueError where `decode` would refuse it."""
        needed = _bytes_needed(_validated(_TENSORS, tensors, "tensors."))
        return cls(json.dumps(tensors, sort_keys=True), needed)


def encode(head: Mapping[str, Any], table: TensorTable) -> str:
    """The text of a manifest, with its checksum; ValueError where `decode` would refuse it."""
    plain = parse_json(json.dumps({**head, "format": FORMAT}).encode(), MANIFEST)
    _check_settings(_validated(_HEAD, plain))
    _refuse_short_files(table.needed, plain["files"])
    values = {name: json.dumps(value, sort_keys=True) for name, value in plain.items()} | {"tensors": table.text}
    canonical = ", ".join(f"{json.dumps(name)}: {values[name]}" for name in sorted(values))
    return f'{{{canonical}, "crc32": {zlib.crc32(f"{{{canonical}}}".encode())}}}\n'


def decode(data: bytes) -> Manifest:
    """The manifest in a text. ValueError, with the reason, if it is not valid."""
    plain = parse_json(data, MANIFEST)
    if not isinstance(plain, dict):
        raise ValueError(f"'{MANIFEST}' is not a mapping")
    for name in ("format", "crc32"):
        if name not in plain:
            raise ValueError(f"'{MANIFEST}' lacks '{name}'")
    if type(plain["format"]) is not int:
        raise ValueError(f"'format' in '{MANIFEST}' is not an integer")
    if plain["format"] != FORMAT:
        raise OtherFormat(f"has format {plain['format']!r:.20}; this version of mplug reads format {FORMAT}")
    if plain.pop("crc32") != checksum(plain):
        raise ValueError(f"'{MANIFEST}' has changed since it was saved")
    manifest = _validated(_SCHEMA, plain)
    _check_settings(manifest)
    _refuse_short_files(_bytes_needed(manifest["tensors"]), manifest["files"])
    return manifest


def checksum(manifest: Mapping[str, Any]) -> int:
    """The CRC-32 of the canonical text of plain data: its keys are sorted, which `encode` writes too."""
    try:
        return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    except RecursionError:
        raise ValueError(f"'{MANIFEST}' is nested too deeply") from None


T = TypeVar("T")


def _validated(schema: TypeAdapter[T], plain: Any, prefix: str = "") -> T:
    try:
        return schema.validate_python(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = prefix + ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"'{MANIFEST}' lacks '{where}'") from None
        raise ValueError(f"'{where}' in '{MANIFEST}': {first['msg'].removeprefix('Value error, ')}") from None


def _check_settings(manifest: Facts) -> None:
    if "config" in manifest:
        _validated(_SETTINGS, manifest["config"], "config.")


# Tensors.


def contents_by_rank(manifest: Manifest, num_ranks: int) -> list[Contents]:
    """A manifest divided into one part per rank, each about other files."""
    parts: list[Contents] = [{"files": {}, "tensors": {}} for _ in range(num_ranks)]
    part_of: dict[str, Contents] = {}
    for number, name in enumerate(sorted(manifest["files"])):
        part_of[name] = parts[number % num_ranks]
        part_of[name]["files"][name] = manifest["files"][name]
    for name, saved in manifest["tensors"].items():
        for chunk in saved["chunks"]:
            tensors = part_of[chunk[0]]["tensors"]
            if name not in tensors:
                tensors[name] = {"shape": saved["shape"], "dtype": saved["dtype"], "chunks": []}
            tensors[name]["chunks"].append(chunk)
    return parts


def expected_in(manifest: Contents) -> Mapping[str, Expected]:
    """The expected contents of each file: the name, dtype and shape of every part in it."""
    contents: dict[str, dict[str, tuple[str, list[int]]]] = {name: {} for name in manifest["files"]}
    for tensor, saved in manifest["tensors"].items():
        for file, start, shape in saved["chunks"]:
            contents[file][name_in_file(tensor, start)] = (saved["dtype"], shape)
    return contents


def name_in_file(tensor: str, start: Iterable[int]) -> str:
    """The name of a part in its file: 'blocks.0.mlp.up.weight/exp_avg@0,128'."""
    return f"{tensor}@{','.join(map(str, start))}"


def _bytes_needed(tensors: Mapping[str, SavedTensor]) -> dict[str, int]:
    """The bytes that chunks need in each file; ValueError where they do not make up their tensors."""
    sizes = defaultdict[str, int](int)
    for name, saved in tensors.items():
        dims = len(saved["shape"])
        if any(len(start) != dims or len(shape) != dims for _, start, shape in saved["chunks"]):
            raise ValueError(f"a chunk of '{name}' has another number of dimensions than the tensor")
        if name[0] == "/" and len(saved["chunks"]) != 1:
            raise ValueError(f"'{name}' is state of a plugin and must have one chunk, not {len(saved['chunks'])}")
        if flaw := uncovered(saved["shape"], [(start, shape) for _, start, shape in saved["chunks"]]):
            raise ValueError(f"'{name}' is not complete: {flaw}")
        for file, _, shape in saved["chunks"]:
            sizes[file] += math.prod(shape) * FORMATS[saved["dtype"]].bytes
    return sizes


def _refuse_short_files(needed: Mapping[str, int], files: Mapping[str, SavedFile]) -> None:
    """Raise ValueError where chunks lie in a file that the manifest does not list, or that is too short for them."""
    for file, size in needed.items():
        if file not in files:
            raise ValueError(f"a chunk is in '{file}', which is not a file of the checkpoint")
        if size > files[file]["bytes"]:
            raise ValueError(f"'{file}' has {files[file]['bytes']} bytes, but its chunks need {size}")
