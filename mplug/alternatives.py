"""Which installed kernel plugins would do where the chosen one cannot: asked only on the way to an error.

Each plugin is tried in a subprocess of its own (`python -m mplug.alternatives`), so that one that does not import,
or hangs, disturbs nothing.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from mplug.config import RunConfig
from mplug.errors import UsageError, listed
from mplug.registry import Registry
from mplug.resolve import resolve
from mplug.settings import from_mapping
from mplug.slots import Unmet

YES = "it would do"
"""What a subprocess prints last where a plugin would do: a plugin that exits when it is imported prints nothing."""
TIMEOUT = 60
"""Seconds that a plugin may take to answer."""


def kernels_that_would_do(config: RunConfig, unmet: Unmet) -> str:
    """The end of the error's sentence: which installed plugins can supply the slot instead."""
    chosen = unmet.plugin.partition("/")[2]
    others = [name for name in Registry().names("kernels") if name != chosen]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda name: _would_do(config, unmet.kind, name), others)
    able = [name for name, would_do in zip(others, answers, strict=True) if would_do]
    if able:
        return f"; {listed(able)} would do: set kernels.{unmet.kind}={able[0]}"
    return f"; no other installed kernel would do; set kernels.{unmet.kind}=null for the composition in plain torch"


def _would_do(config: RunConfig, kind: str, name: str) -> bool:
    settings = config.resolved()
    settings["kernels"] = {**settings["kernels"], kind: name}
    command = [sys.executable, "-m", "mplug.alternatives"]
    try:
        finished = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False
    return finished.stdout.endswith(f"{YES}\n")


def main() -> None:
    """Print whether the config on standard input can be built."""
    from mplug.build import unmet_reasons  # imports torch
    from mplug.run import prepare

    try:
        config = resolve(Registry(), from_mapping(json.load(sys.stdin), "standard input"), {})
        able = not unmet_reasons(prepare(config))
    except UsageError:
        able = False
    print(YES if able else "no")


if __name__ == "__main__":
    main()
