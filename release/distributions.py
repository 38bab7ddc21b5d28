"""The distributions of this repository, and the files that state their version.

`requirements.txt` lists the distributions that the README's command installs, and `requirements-optional.txt` lists
those over large libraries. mplug-all requires the first, and its extra `optional` the second.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALL = ROOT / "release" / "all"
"""The distribution that requires all others. It has no code."""
VERSION = ROOT / "mplug" / "system" / "version.py"
"""The one place of the version. Every other file that states it is written from here."""
BOUNDED = (
    "testing/src/mplug_testing/scaffold.py",
    "testing/src/mplug_testing/suite.py",
    "docs/plugins.md",
)
"""Files beside the pyproject.toml of distributions that state the versions of mplug that a plugin requires."""


def listed(requirements: str) -> list[Path]:
    """The folders of the distributions that a requirements file lists, the host first."""
    lines = (ROOT / requirements).read_text(encoding="utf-8").splitlines()
    return [ROOT / line.removeprefix("-e ") for line in lines if line.startswith("-e ")]


def bundled() -> list[Path]:
    """The folders of the distributions that mplug-all installs."""
    return listed("requirements.txt")


def optional() -> list[Path]:
    """The folders of the distributions over large libraries."""
    return [folder for folder in listed("requirements-optional.txt") if folder != ROOT]


def every() -> list[Path]:
    """The folders of all distributions; mplug-all is the last."""
    return [*bundled(), *optional(), ALL]


def project(folder: Path) -> dict:
    """The table `project` of a distribution's pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def version() -> str:
    """The version of all distributions."""
    found = re.search(r'^__version__ = "(.+)"$', VERSION.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, VERSION
    return found[1]


def bounds(of: str) -> str:
    """The versions of mplug that a plugin of a version works with: '>=0.1,<0.2' of '0.1.3'."""
    major, minor = (int(number) for number in of.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"
