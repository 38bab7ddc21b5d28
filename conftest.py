"""What the tests of the host and of all bundled plugins share.

Two files are tested at a time, so whoever computes does it with one thread: more than there are cores only wait.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mplug.testing.workers import PRELOAD

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

HEAVY = {"energon", "flash", "huggingface", "quack", "sentencepiece", "tiktoken", "triton"}
"""Plugins whose libraries take long to import."""


def modules_of_plugins() -> list[str]:
    """Every module of the bundled plugins but the heavy ones: workers of `mplug.testing` start with them imported."""
    packages = sorted(Path(__file__).parent.glob("plugins/*/*/src/*"))
    files = [file for one in packages if one.parent.parent.name not in HEAVY for file in one.rglob("*.py")]
    names = (".".join(file.relative_to(_source_of(file)).with_suffix("").parts) for file in files)
    return sorted({name.removesuffix(".__init__") for name in names if not name.endswith("__main__")})


def _source_of(file: Path) -> Path:
    return next(folder for folder in file.parents if folder.name == "src")


PRELOAD.extend(modules_of_plugins())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no 'mount' here")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
