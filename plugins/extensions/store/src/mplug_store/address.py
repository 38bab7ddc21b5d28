"""A folder of a store: the only module that calls fsspec. Errors of all its libraries become one sentence."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mplug import RunError, UsageError

PART = 64 << 20
"""Bytes of a part of a file. A store takes files in parts; S3 allows 10,000 of them."""
PARTIAL = ".partial"
"""The end of the name under which a small file is written before it gets its own name."""
MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created")
"""Fields of a store's listing that differ if a file was written again; the first that it has counts."""


class StoreError(RunError):
    """A store failed or refused a request."""


def refuse_unusable(address: str, field: str) -> None:
    """Raise UsageError unless the address has a protocol whose library is installed. Sends no request."""
    protocol, separator, rest = address.partition("://")
    if not separator or not protocol or not rest.strip("/"):
        raise UsageError(f"{field}: '{address}' is no address of a store; use one such as s3://BUCKET/FOLDER")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise UsageError(f"{field}: '{address}' needs another package: {_sentence(error)}") from None
    except ValueError:
        raise UsageError(
            f"{field}: fsspec knows no protocol '{protocol}' of '{address}'; use s3, gs or another"
        ) from None


class Store:
    """A folder of a store. The name of a file is its path in the folder, with '/'.

    A store shows a new file when it is complete, or, on a file system, while it grows. Methods raise StoreError.
    """

    def __init__(self, address: str) -> None:
        refuse_unusable(address, "address of a store")
        self.address = address.rstrip("/")
        with self._explained("open"):
            self.files, root = url_to_fs(self.address)
        if isinstance(self.files, LocalFileSystem):
            self.files = LocalFileSystem(auto_mkdir=True)
        self.root = str(root).rstrip("/")

    def sizes(self, below: str = "") -> dict[str, int]:
        """The size of every file in a folder, by name. Empty if there is no such folder."""
        return {name: size for name, (size, _) in self.listing(below).items()}

    def listing(self, below: str = "") -> dict[str, tuple[int, str]]:
        """By the name of every file in a folder: its size, and a mark that changes if it is written again."""
        with self._explained("list", below):
            self.files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self.files.find(self._path(below), detail=True)
        marks = {path: next((str(one[mark]) for mark in MARKS if one.get(mark)), "") for path, one in found.items()}
        return {
            path[len(self.root) :].strip("/"): (int(one["size"]), marks[path])
            for path, one in found.items()
            if one.get("type", "file") == "file"
        }

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if there is none."""
        try:
            with self._explained("read", name):
                content: bytes = self.files.cat_file(self._path(name))
                return content
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a small file under another name, then rename it: it is never visible in part."""
        with self._explained("write", name):
            self.files.pipe_file(self._path(name + PARTIAL), content)
            self.files.mv(self._path(name + PARTIAL), self._path(name))

    def write(self, name: str, source: IO[bytes]) -> int:
        """Write a file in parts, from the start of an open file. Returns the CRC-32 of what was written."""
        checksum = 0
        source.seek(0)
        with self._explained("write", name), self.files.open(self._path(name), "wb", block_size=PART) as target:
            while part := source.read(PART):
                checksum = zlib.crc32(part, checksum)
                target.write(part)
        return checksum

    def copy_to(self, name: str, target: IO[bytes]) -> int:
        """Copy a file into an open file. Returns the CRC-32 of what was read."""
        checksum = 0
        with self._explained("read", name), self.files.open(self._path(name), "rb", block_size=PART) as source:
            while part := source.read(PART):
                checksum = zlib.crc32(part, checksum)
                target.write(part)
        return checksum

    def remove(self, names: Iterable[str]) -> None:
        """Remove files one by one, in the order of the names. A file that is absent counts as removed."""
        for name in names:
            with self._explained("remove", name), suppress(FileNotFoundError):
                self.files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def _explained(self, verb: str, name: str = "") -> Iterator[None]:
        """The libraries of stores raise many classes of errors, which have no common one."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            path = f"{self.address}/{name}" if name else self.address
            raise StoreError(f"cannot {verb} '{path}': {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """An error on one line, with its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
