"""Where the chunks of a checkpoint's tensors are, in a form that one rank makes and all ranks receive. Torch-free."""

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mplug.contracts.optimizer import AVERAGE
from mplug.errors import UsageError

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug_saving.manifest import Contents

Start = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Overlap:
    """A box of a tensor that a chunk and a wanted box have in common.

    `file` holds the chunk, which begins at `chunk` in the tensor, and `wanted` is where the wanted box begins. The
    common box begins at `stored` in the chunk and at `placed` in the wanted box.
    """

    file: str
    chunk: Start
    wanted: Start
    stored: Start
    placed: Start
    shape: Shape


@dataclass(frozen=True)
class _Packed:
    """The chunks of a tensor, sorted by their starts along one dimension; the longest has `longest` elements there.

    `columns` has their files' numbers, then their starts and their lengths, dimension by dimension.
    """

    along: int
    longest: int
    columns: bytes

    @classmethod
    def of(cls, chunks: Iterable[tuple[str, list[int], list[int]]], numbers: Mapping[str, int]) -> "_Packed":
        rows = [(numbers[file], *start, *shape) for file, start, shape in chunks]
        dims = len(rows[0]) // 2
        starts = range(1, dims + 1)
        first = max(starts, key=lambda column: len({row[column] for row in rows}), default=0)
        rows.sort(key=lambda row: row[first])
        longest = max(row[first + dims] for row in rows) if dims else 0
        flat = array("q", (row[column] for column in range(2 * dims + 1) for row in rows))
        return cls(first - 1, longest, zlib.compress(flat.tobytes(), 1))

    def unpacked(self, dims: int) -> "tuple[array[int], list[array[int]], list[array[int]]]":
        """(numbers of files, starts by dimension, lengths by dimension)."""
        flat = array("q")
        flat.frombytes(zlib.decompress(self.columns))
        count = len(flat) // (2 * dims + 1)
        columns = [flat[count * column : count * (column + 1)] for column in range(2 * dims + 1)]
        return columns[0], columns[1 : dims + 1], columns[dims + 1 :]


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint: their logical shapes, and the files and boxes of their chunks.

    `files` are all files of the checkpoint. A rank unpacks only the chunks of the tensors that it asks for.
    """

    shapes: Mapping[str, Shape]
    files: tuple[str, ...]
    packed: Mapping[str, _Packed]

    @classmethod
    def of(cls, manifest: "Contents") -> "Index":
        """The index of a validated manifest: every tensor has chunks, of its own dimensions."""
        files, tensors = sorted(manifest["files"]), manifest["tensors"]
        numbers = {file: number for number, file in enumerate(files)}
        return cls(
            shapes_of(manifest),
            tuple(files),
            {name: _Packed.of(saved["chunks"], numbers) for name, saved in tensors.items()},
        )

    def overlaps(self, name: str, boxes: Iterable[tuple[Start, Shape]]) -> Iterator[Overlap]:
        """The common parts of a tensor's chunks with boxes of it, each given by its start and its shape.

        The chunks near a box are found by bisection of their starts along one dimension.
        """
        dims, packed = len(self.shapes[name]), self.packed[name]
        files, starts, lengths = packed.unpacked(dims)
        for wanted, shape in boxes:
            rows = range(len(files))
            if dims:
                sorted_by, first = starts[packed.along], wanted[packed.along]
                low = bisect_right(sorted_by, first - packed.longest)
                rows = range(low, bisect_left(sorted_by, first + shape[packed.along]))
            for row in rows:
                chunk = tuple(column[row] for column in starts)
                begin = tuple(map(max, chunk, wanted))
                ends = map(min, _ends(chunk, (column[row] for column in lengths)), _ends(wanted, shape))
                common = tuple(end - start for end, start in zip(ends, begin, strict=True))
                if min(common, default=1) > 0:
                    stored, placed = _within(begin, chunk), _within(begin, wanted)
                    yield Overlap(self.files[files[row]], chunk, wanted, stored, placed, common)

    def chunks_in(self, file: str) -> Iterator[tuple[str, Start, Shape]]:
        """The chunks of a file: the name of the tensor, where the chunk begins in it, and its shape."""
        number = self.files.index(file)
        for name, packed in self.packed.items():
            files, starts, lengths = packed.unpacked(len(self.shapes[name]))
            for row, holder in enumerate(files):
                if holder == number:
                    yield name, tuple(one[row] for one in starts), tuple(one[row] for one in lengths)

    def values_of(self, parameter: str, averages: bool) -> str:
        """The name of the tensor with the values of a parameter: its weight, or with `averages` its average if any."""
        average = f"{parameter}/{AVERAGE}"
        return average if averages and average in self.shapes else f"{parameter}/weight"

    def averaged(self) -> list[str]:
        """The parameters that have an average."""
        end = f"/{AVERAGE}"
        return [name.removesuffix(end) for name in self.shapes if name.endswith(end)]

    def only_chunk(self, name: str) -> tuple[str, Start]:
        """The file and the start of the chunk of a tensor that has one chunk."""
        (file,), starts, _ = self.packed[name].unpacked(len(self.shapes[name]))
        return self.files[file], tuple(start for (start,) in starts)


def shapes_of(manifest: "Contents") -> dict[str, Shape]:
    """The logical shapes of a manifest's tensors."""
    return {name: tuple(saved["shape"]) for name, saved in manifest["tensors"].items()}


def weights_in(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of a checkpoint's parameters by name, from the shapes of all its tensors."""
    return {
        name.removesuffix("/weight"): shape
        for name, shape in shapes.items()
        if name.endswith("/weight") and name[0] != "/"
    }


def refuse_larger(label: str, weights: Iterable[str], model: "Model") -> None:
    """Raise UsageError if a checkpoint has a parameter that the model lacks; `label` names the checkpoint.

    `weights` are the names of the checkpoint's parameters.
    """
    for extra in sorted(set(weights) - model.placements.keys()):
        raise UsageError(f"{label} has the parameter '{extra}', which the model lacks; use a checkpoint of this model")


def _ends(start: Iterable[int], shape: Iterable[int]) -> Iterator[int]:
    return (first + length for first, length in zip(start, shape, strict=True))


def _within(start: Start, origin: Start) -> Start:
    return tuple(s - o for s, o in zip(start, origin, strict=True))
