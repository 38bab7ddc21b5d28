"""Whether a loader's fingerprint is that of its samples: equal in another place, and another for other samples."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import UsageError
from mplug_testing.samples import difference, read
from mplug_testing.suite import Fault, PluginSuite, require

if TYPE_CHECKING:
    from mplug.contracts.loader import Loader

LOOK = 64
PATH = "data.path"
LARGEST_COPY = 1 << 26
"""Maximum bytes of data that the suite copies."""


class FingerprintChecks(PluginSuite):
    """The fingerprint of a loader follows its samples, and never the place of its files."""

    other_data: ClassVar[Mapping[str, Any]] = {}
    """Settings with other samples, if the suite cannot change the data itself: `data.path` is no file of lines."""

    @classmethod
    def alone(cls, split: str = "train", **changes: Any) -> "Loader":
        """A new loader of a run with one rank."""
        raise NotImplementedError

    def test_its_fingerprint_is_that_of_its_samples(self) -> None:
        """A copy of the data in another place has the same fingerprint; data with other samples has another."""
        loader = self.alone()
        own = loader.fingerprint
        if own is None:
            raise SkipTest("the loader states no fingerprint, so a run whose data is elsewhere is not resumed")
        place = self.tiny().get(PATH)
        copied = isinstance(place, str) and _size(place) <= LARGEST_COPY
        with TemporaryDirectory(prefix="mplug-data-") as folder:
            if copied:
                moved = self.alone(data__path=_copied(str(place), Path(folder) / "moved"))
                require(
                    moved.fingerprint == own,
                    f"a copy of the data in another place has another fingerprint ({moved.fingerprint!r} instead of "
                    f"{own!r}); compute it from the samples and not from data.path",
                )
            others = list(self._with_other_samples(str(place) if copied else None, Path(folder), loader))
        for other, how in others:
            require(
                other.fingerprint != own,
                f"data with other samples ({how}) has the same fingerprint, so a run would resume with other data; "
                f"compute it from the samples",
            )
        if not others:
            raise SkipTest("the suite cannot change the data; give settings with other samples in `other_data`")

    def _with_other_samples(self, place: str | None, folder: Path, loader: "Loader") -> "Iterator[tuple[Loader, str]]":
        """Loaders of other data, each with the way in which the data differs."""
        given = [(self.other_data, "the suite's `other_data`")] if self.other_data else []
        if place is not None and _lines_of(place):
            changed = _copied(place, folder / "changed")
            _turn_lines(changed)
            given.append(({PATH: changed}, "the same lines in another order"))
        for settings, how in given:
            try:
                found = self.alone(**{name.replace(".", "__"): value for name, value in settings.items()})
            except (UsageError, Fault) as error:
                if settings is self.other_data:
                    raise Fault(f"`other_data` is refused: {error}") from error
                continue
            expected = self.alone()
            if difference(read(found, LOOK), read(expected, LOOK)):
                yield found, how
            else:
                require(settings is not self.other_data, "`other_data` has the samples of the suite's own data")


def _files(place: str) -> list[Path]:
    """The files of a path: a file, a folder, or all files whose names begin with it and a dot."""
    path = Path(place)
    if path.is_dir():
        return sorted(one for one in path.rglob("*") if one.is_file())
    return [path] if path.is_file() else sorted(path.parent.glob(f"{path.name}.*"))


def _size(place: str) -> float:
    files = _files(place)
    return sum(file.stat().st_size for file in files) if files else float("inf")


def _copied(place: str, target: Path) -> str:
    """Copy data to another folder; returns its new path, with the same name."""
    path = Path(place)
    target.mkdir()
    if path.is_dir():
        return str(shutil.copytree(path, target / path.name))
    for file in _files(place):
        shutil.copy(file, target / file.name)
    return str(target / path.name)


def _lines_of(place: str) -> bool:
    """Whether the path is one text file of several lines."""
    path = Path(place)
    try:
        return path.is_file() and len(path.read_text(encoding="utf-8").splitlines()) > 2
    except UnicodeDecodeError:
        return False


def _turn_lines(place: str) -> None:
    """Reverse the lines of a file, except the first, which may hold names of columns."""
    first, *rest = Path(place).read_text(encoding="utf-8").splitlines()
    Path(place).write_text("\n".join([first, *reversed(rest)]) + "\n", encoding="utf-8")
