"""What is installed, as the standard library finds it, and without importing that part of it."""

import importlib.metadata
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from mplug.registry import installed
from mplug.registry.installed import described, described_on_path

POINTS = "[mplug.extensions]\nnew = acme_new:New\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of `sys.path` with metadata in the two forms, and in an old form that is one file."""
    for name, file in {"acme_new-2.0.dist-info": "METADATA", "acme_old-1.0.egg-info": "PKG-INFO"}.items():
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        title = name.partition("-")[0]
        (folder / file).write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\nSummary: of {title}\n")
        (folder / "entry_points.txt").write_text(POINTS)
    (tmp_path / "site" / "acme_old-1.0.egg-info" / "requires.txt").write_text("mplug>=0.1,<0.2\n")
    (tmp_path / "site" / "acme_file-1.0.egg-info").write_text("Metadata-Version: 1.0\nName: acme-file\nVersion: 1.0\n")
    folders = [one for one in sys.path if not Path(one).is_file()]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "absent"), *folders])
    return tmp_path / "site"


def found() -> list[object]:
    return sorted(described_on_path())


def names() -> set[str]:
    return {metadata.name for metadata, _ in described_on_path()}


def expected() -> list[object]:
    return sorted(described(importlib.metadata.distributions()))


def test_folders_have_the_distributions_that_the_standard_library_finds(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_finds_distributions", lambda _: False)  # another test may have imported a finder
    assert found() == expected()
    assert ("acme_old", "1.0", "of acme_old", ">=0.1,<0.2", str(site)) in [metadata for metadata, _ in found()]


def test_archives_and_finders_of_others_are_left_to_the_standard_library(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZipFile(site.parent / "more.zip", "w") as archive:
        archive.writestr("acme_zip-3.0.dist-info/METADATA", "Name: acme-zip\nVersion: 3.0\nSummary: zipped\n")
        archive.writestr("acme_zip-3.0.dist-info/entry_points.txt", POINTS)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site.parent / "more.zip")])
        assert "acme-zip" in names()
        assert found() == expected()

    class Finder:
        @staticmethod
        def find_distributions(*_: object) -> list[importlib.metadata.Distribution]:
            return [importlib.metadata.PathDistribution(site.parent / "hidden" / "acme_hidden-1.0.dist-info")]

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None: ...

    hidden = site.parent / "hidden" / "acme_hidden-1.0.dist-info"
    hidden.mkdir(parents=True)
    (hidden / "METADATA").write_text("Name: acme-hidden\nVersion: 1.0\n")
    (hidden / "entry_points.txt").write_text(POINTS)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert "acme-hidden" in names()
