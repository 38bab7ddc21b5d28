"""All installed plugins together: what is imported at start-up is light."""

import subprocess
import sys

SCRIPT = f"""
import importlib, sys
sys.path[:] = {sys.path!r}
from mplug_testing.harness import installed_plugins
for entry in installed_plugins().entries():
    try:
        importlib.import_module(entry.target.partition(":")[0])
    except ModuleNotFoundError as error:
        if error.name.startswith("mplug"):
            raise
    if "torch" in sys.modules:
        sys.exit(f"{{entry.kind}}/{{entry.name}} imports torch; import it inside hooks")
"""


def test_importing_the_plugins_imports_no_torch() -> None:
    """The suites also configure each of them, in processes of their own (wide set `suites`)."""
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
