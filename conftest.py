"""What the tests of the host and of all bundled plugins share.

Two files are tested at a time, so whoever computes does it with one thread: more than there are cores only wait.
No example of hypothesis fails because it is slow: how long it takes depends on the processor and its other work.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
settings.register_profile("any processor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any processor")


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
