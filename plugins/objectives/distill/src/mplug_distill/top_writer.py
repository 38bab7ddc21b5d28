"""Writing a file of a teacher's largest probabilities (`top_file`). An interrupted command can continue it.

Until the file is whole, its parts are in a folder beside it: `manifest.json` says what they are made from; `tokens` and
`log_probabilities` have the arrays of the file, and `samples` two numbers of each sample that is saved: the digest of
its tokens and labels, and the number of its targets. A sample is saved when its arrays are on the disk. Imports no
torch.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mplug import RunError, UsageError, write_whole
from mplug_distill.top_file import DTYPES, FORM, NUMPY, TEMPERATURE, Origin

ARRAYS = ("tokens", "log_probabilities")
BLOCK = 1 << 24
SAVE_SECONDS = 10.0
"""Seconds between two saves. What is computed in between is lost if the command is killed."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class TopWriter:
    """Writes a file sample by sample; `path` gets its name in `finish`.

    It continues what an interrupted command left, if that was made from the same origin and `made`, which describes
    what the values depend on beside it. Raises UsageError if it was made from something else, and there is no
    `restart`, or if another process writes the file.
    """

    def __init__(
        self, path: Path, origin: Origin, dtype: str, made: Mapping[str, Any] = NOTHING, *, restart: bool = False
    ) -> None:
        self.path, self.origin, self.dtype = path, origin, dtype
        self.folder = folder_of(path)
        self.counts, self.digests = list[int](), list[int]()
        self.unsaved, self.saved_at = 0, time.monotonic()
        with ExitStack() as closing:
            self.folder.mkdir(exist_ok=True)
            lock = closing.enter_context((self.folder / "lock").open("w"))
            self._claim(lock)
            self._begin({**asdict(origin), "dtype": dtype, "form": FORM, **made}, restart)
            self.files: dict[str, IO[bytes]] = {
                name: closing.enter_context((self.folder / name).open("a+b")) for name in ("samples", *ARRAYS)
            }
            self._continue()
            self._closing = closing.pop_all()

    @property
    def num_samples(self) -> int:
        """The samples that the file has so far."""
        return len(self.digests)

    def _claim(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing '{self.path}'; wait for it, or stop it") from None

    def _begin(self, identity: dict[str, Any], restart: bool) -> None:
        manifest = self.folder / "manifest.json"
        try:
            found = json.loads(manifest.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            found = None
        if found == identity and not restart:
            return
        if isinstance(found, dict) and not restart and self._size("samples"):
            different = [name for name in identity if found.get(name) != identity[name]]
            raise UsageError(
                f"an interrupted command has left a part of '{self.path}', which was made with other "
                f"{' and '.join(different)}; use the same options to continue it, --restart to begin anew, or another "
                f"--output"
            )
        for name in ("manifest.json", "samples", *ARRAYS):
            (self.folder / name).unlink(missing_ok=True)
        write_whole(manifest, json.dumps(identity))

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def _continue(self) -> None:
        """Read the samples that are saved whole."""
        self.files["samples"].seek(0)
        content = self.files["samples"].read()
        saved = np.frombuffer(content, "<i8", len(content) // 16 * 2).reshape(-1, 2)
        ends, (of_tokens, of_logs) = np.cumsum(saved[:, 1]), self._bytes_of_target()
        whole = (ends * of_tokens <= self._size(ARRAYS[0])) & (ends * of_logs <= self._size(ARRAYS[1]))
        self.digests, self.counts = saved[whole, 0].tolist(), saved[whole, 1].tolist()
        self.keep(self.num_samples)

    def _bytes_of_target(self) -> tuple[int, int]:
        k = self.origin.k
        return 4 * k, (k + 1) * np.dtype(NUMPY[DTYPES[self.dtype]]).itemsize

    def keep(self, limit: int, multiple: int = 1) -> None:
        """Keep the first samples: at most `limit`, and a multiple of `multiple`. Call it before `add`."""
        number = min(self.num_samples, limit) // multiple * multiple
        self.digests, self.counts = self.digests[:number], self.counts[:number]
        self.files["samples"].truncate(16 * number)
        for name, size in zip(ARRAYS, self._bytes_of_target(), strict=True):
            self.files[name].truncate(size * sum(self.counts))

    def add(self, sample: int, found: NDArray[np.int32], logs: NDArray[Any]) -> None:
        """The targets of the next sample, by the digest of its tokens and labels: [t, k] and [t, k + 1]."""
        arrays = (found.astype("<i4"), logs.astype(NUMPY[DTYPES[self.dtype]]))
        with _stating(self.path):
            for name, array in zip(ARRAYS, arrays, strict=True):
                self.files[name].write(array.tobytes())
        self.digests.append(sample)
        self.counts.append(len(found))
        self.unsaved += 1
        if time.monotonic() > self.saved_at + SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write all samples to the disk."""
        first = self.num_samples - self.unsaved
        records = np.array([self.digests[first:], self.counts[first:]], "<i8").T
        with _stating(self.path):
            for name in ARRAYS:
                _sync(self.files[name])
            self.files["samples"].write(records.tobytes())
            _sync(self.files["samples"])
        self.unsaved, self.saved_at = 0, time.monotonic()

    def finish(self) -> None:
        """Join the parts, and give the file its name."""
        offsets, contents = np.cumsum([0, *self.counts], dtype="<i8"), blake2b(digest_size=16)
        whole = self.folder / "whole"
        with _stating(self.path), whole.open("wb") as file:
            file.write(self._header(int(offsets[-1]), contents.hexdigest()))
            file.write(offsets.tobytes() + np.array(self.digests, "<i8").tobytes())
            for name in ARRAYS:
                self.files[name].seek(0)
                while block := self.files[name].read(BLOCK):
                    contents.update(block)
                    file.write(block)
            file.seek(0)
            file.write(self._header(int(offsets[-1]), contents.hexdigest()))
            _sync(file)
        whole.replace(self.path)

    def _header(self, targets: int, contents: str) -> bytes:
        k, kind = self.origin.k, DTYPES[self.dtype]
        shapes: dict[str, tuple[str, list[int]]] = {
            "offsets": ("I64", [self.num_samples + 1]),
            "digests": ("I64", [self.num_samples]),
            "tokens": ("I32", [targets, k]),
            "log_probabilities": (kind, [targets, k + 1]),
        }
        metadata = {name: json.dumps(value) for name, value in asdict(self.origin).items()}
        metadata |= {"form": FORM, "temperature": json.dumps(TEMPERATURE), "contents": contents}
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, (kind, shape) in shapes.items():
            begin, end = end, end + int(np.prod(shape)) * np.dtype(NUMPY[kind]).itemsize
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def close(self, *, remove: bool) -> None:
        """Close the files of the folder, and perhaps remove it."""
        self._closing.close()
        if remove:
            shutil.rmtree(self.folder)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def folder_of(path: Path) -> Path:
    """The folder of the parts of a file."""
    return path.with_name(f".{path.name}.partial")


def is_left(path: Path) -> bool:
    """Whether an interrupted command has left a part of a file, which the next one can continue."""
    return (folder_of(path) / "samples").is_file()


@contextmanager
def written(
    path: Path, origin: Origin, dtype: str, made: Mapping[str, Any] = NOTHING, *, restart: bool = False
) -> Iterator[TopWriter]:
    """A writer. After an error, `path` is what it was before, and the samples so far are kept beside it."""
    with _stating(path):
        writer = TopWriter(path, origin, dtype, made, restart=restart)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.save()
        writer.close(remove=not writer.num_samples)
        raise
    writer.close(remove=True)


@contextmanager
def _stating(path: Path) -> Iterator[None]:
    """A failure of the disk as a RunError with the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write '{path}': {error.strerror or error}") from None
