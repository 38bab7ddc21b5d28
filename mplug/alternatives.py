"""Which installed kernel plugins would do where the chosen one cannot: asked only on the way to an error.

Each plugin is tried in a subprocess of its own (`python -m mplug.alternatives`), so that one that does not import
disturbs nothing.
"""

import json
import subprocess
import sys

from mplug.config import RunConfig
from mplug.errors import UsageError, listed
from mplug.registry import Registry
from mplug.resolve import resolve
from mplug.settings import from_mapping
from mplug.slots import Unmet

TIMEOUT = 60
"""Seconds that a plugin may take to answer."""


def kernels_that_would_do(config: RunConfig, unmet: Unmet) -> str:
    """The end of the error's sentence: which installed plugins can supply the slot instead."""
    chosen = unmet.plugin.partition("/")[2]
    able = [name for name in Registry().names("kernels") if name != chosen and _would_do(config, unmet.kind, name)]
    if able:
        return f"; {listed(able)} would do: set kernels.{unmet.kind}={able[0]}"
    return f"; no other installed kernel would do; set kernels.{unmet.kind}=null for the composition in plain torch"


def _would_do(config: RunConfig, kind: str, name: str) -> bool:
    settings = config.resolved()
    settings["kernels"] = {**settings["kernels"], kind: name}
    finished = subprocess.run(
        [sys.executable, "-m", "mplug.alternatives"],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return finished.returncode == 0


def main() -> int:
    """Exit status 0 where the config on standard input can be built."""
    from mplug.build import unmet_reasons  # imports torch
    from mplug.run import prepare

    try:
        config = resolve(Registry(), from_mapping(json.load(sys.stdin), "standard input"), {})
        return 1 if unmet_reasons(prepare(config)) else 0
    except UsageError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
