"""`mplug plugins test`: run the tests of a plugin's package, or the suite of its kind where the package has none."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from mplug.config.entry import Entry
from mplug.errors import UsageError, listed
from mplug_testing.plugin_check import suite_of
from mplug_testing.suite import unset_fields


def run_tests(entry: Entry, arguments: list[str]) -> int:
    """Run pytest with these arguments; its exit status. UsageError if the plugin has no tests that could run."""
    if find_spec("pytest") is None:
        raise UsageError(f"pytest is not installed in this environment: {sys.executable} -m pip install pytest")
    folder = Path(entry.source)
    if (folder / "pyproject.toml").is_file() and (folder / "tests").is_dir():
        return _pytest(folder / "tests", arguments)
    with TemporaryDirectory() as made:
        name = f"{entry.distribution}/{entry.name}"
        module, suite = _suite(entry)
        (Path(made) / "test_suite.py").write_text(
            f"from {module} import {suite}\n\n\nclass TestPlugin({suite}):\n    plugin = {name!r}\n"
        )
        return _pytest(Path(made), arguments)


def _suite(entry: Entry) -> tuple[str, str]:
    """The module and the name of the suite of a plugin without tests of its own."""
    suite = suite_of(entry.kind)
    unset = unset_fields(type("Check", (suite,), {"plugin": f"{entry.distribution}/{entry.name}"}))
    if unset:
        raise UsageError(
            f"{entry.label} ({entry.origin}) is installed without its tests, and its Config requires {listed(unset)}, "
            f"so the suite of its kind cannot run it; install it from its source folder (pip install -e FOLDER)"
        )
    return suite.__module__, suite.__name__


def _pytest(path: Path, arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", str(path), *arguments], check=False).returncode
