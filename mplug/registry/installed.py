"""What the metadata of installed distributions state: their names, versions, requirements and entry points.

`importlib.metadata` finds the same distributions. Its import takes longer than all others of a listing together, so it
is asked only if there is more than folders to search: archives on `sys.path`, or finders of other packages.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    from importlib.metadata import Distribution

HOST_DISTRIBUTION = "mplug"
"""The distribution of the host. Its own plugins belong to exactly its version."""
ENDINGS = (".dist-info", ".egg-info")
"""How the names of folders with metadata end."""


class Folder:
    """A folder with the metadata of a distribution. The methods are those of `importlib.metadata.Distribution`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read_text(self, name: str) -> str | None:
        """The text of a file in the folder, or None."""
        try:
            with open(os.path.join(self.path, name), encoding="utf-8") as file:
                return file.read()
        except OSError:
            return None

    def locate_file(self, name: str) -> str:
        """The path of an installed file."""
        return os.path.join(os.path.dirname(self.path), name) if name else os.path.dirname(self.path)

    @property
    def requires(self) -> list[str] | None:
        """The requirements, also those that an old form of metadata keeps in a file of its own."""
        from importlib.metadata import Distribution

        return Distribution.at(self.path).requires


Installed = Union[Folder, "Distribution"]


class Metadata(NamedTuple):
    """What a distribution says of itself. `requires` are the versions of the host, `source` is the folder."""

    name: str
    version: str
    summary: str
    requires: str | None
    source: str


class Point(NamedTuple):
    """An entry point: a line of entry_points.txt."""

    name: str
    value: str
    group: str


class Described(NamedTuple):
    """A distribution with entry points for mplug: what it says of itself, and these entry points."""

    metadata: Metadata
    points: tuple[Point, ...]


def described_on_path() -> Iterable[Described]:
    """The distributions with entry points for mplug that are found along `sys.path`, in its order."""
    if all(map(_is_plain, sys.path)) and not any(map(_finds_distributions, sys.meta_path)):
        return (one for folder, state in state_of_path() for one in _described_in(folder, state))
    from importlib.metadata import distributions

    return described(distributions())


State = tuple[int, int]
"""The time at which a folder was changed, and the number of its folders: the clock of a file system may be coarse."""


def state_of_path() -> tuple[tuple[str, State], ...]:
    """The folders of `sys.path` with their states: an installation changes one of them."""
    return tuple((folder, _state_of(folder)) for folder in folders_of_path())


def folders_of_path() -> tuple[str, ...]:
    """The absolute paths that `sys.path` names."""
    return tuple(_normal(folder) if folder.startswith(os.sep) else os.path.abspath(folder) for folder in sys.path)


@lru_cache(maxsize=1024)
def _normal(folder: str) -> str:
    """An absolute path without '..': the same hundred paths are asked for again and again."""
    return os.path.abspath(folder)


def _state_of(folder: str) -> State:
    try:
        found = os.stat(folder)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_nlink


def _is_plain(folder: str) -> bool:
    """Whether a place of `sys.path` is a folder or absent; an egg is a folder with metadata in another form."""
    return not folder.lower().endswith(".egg") and not os.path.isfile(folder)


def _finds_distributions(finder: object) -> bool:
    return finder is not PathFinder and hasattr(finder, "find_distributions")


@lru_cache(maxsize=256)
def _described_in(folder: str, state: State) -> tuple[Described, ...]:  # the state is a part of the key
    """The distributions of a folder: a run reads them for the config, its model's lists and each layout again."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    found = (Folder(os.path.join(folder, name)) for name in names if name.lower().endswith(ENDINGS))
    return tuple(described(found))


def described(installed: Iterable[Installed]) -> Iterator[Described]:
    """The distributions with entry points for mplug; the metadata of the others are not read."""
    for distribution in installed:
        text = distribution.read_text("entry_points.txt") or ""
        if "[mplug" in text:
            own = tuple(point for point in points_in(text) if point.group.startswith("mplug"))
            yield Described(metadata_of(distribution), own)


def metadata_of(distribution: Installed) -> Metadata:
    """What a distribution says of itself."""
    headers = _headers(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
    name, version, summary = (headers.get(field, [""])[0] for field in ("name", "version", "summary"))
    requires = _requirement_on_host(headers.get("requires-dist") or distribution.requires or [])
    own = f"=={version}" if name == HOST_DISTRIBUTION else requires
    return Metadata(name, version, summary, own, _source(distribution))


def _headers(text: str) -> dict[str, list[str]]:
    """The fields before the first empty line of core metadata, by their names in lower case.

    `Distribution.metadata` reads the whole text, the description included, which takes most of the time of a scan.
    """
    headers: dict[str, list[str]] = {}
    values: list[str] = []
    for line in text.split("\n"):
        if not line:
            break
        if line[0] in " \t" and values:  # continues the line before
            values[-1] += f"\n{line}"
            continue
        field, _, value = line.partition(":")
        values = headers.setdefault(field.lower(), [])
        values.append(value.strip())
    return headers


def points_in(text: str) -> Iterator[Point]:
    """The entry points of a file entry_points.txt."""
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1]
        elif not line.startswith("#"):
            name, _, value = line.partition("=")
            yield Point(name.strip(), value.strip(), group)


def _source(distribution: Installed) -> str:
    """The source folder of an editable install, else the folder that contains the metadata."""
    if (text := distribution.read_text("direct_url.json")) is not None:
        import json  # most distributions lack the file

        origin = json.loads(text)
        if origin.get("dir_info", {}).get("editable"):
            return _unquoted(origin["url"].removeprefix("file://"))
    return str(distribution.locate_file(""))


def _unquoted(path: str) -> str:
    if "%" not in path:
        return path
    from urllib.parse import unquote  # few paths need it

    return unquote(path)


def _requirement_on_host(requirements: Iterable[str]) -> str | None:
    for requirement in requirements:
        host = re.match(r"mplug\s*\(?([<>=!~][^;)]*)?\)?\s*(?:;|$)", requirement)
        if host:
            return (host[1] or "").strip()
    return None
