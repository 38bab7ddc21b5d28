"""Find installed kernel plugins that can replace one that cannot serve a run. Used only to complete an error message.

Each plugin is tried in a separate process (`python -m mplug.alternatives`), so that a plugin that fails to import, or
hangs, does no harm.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mplug.config import RunConfig
from mplug.errors import UsageError, listed
from mplug.registry import Registry
from mplug.resolve import resolve
from mplug.settings import from_mapping
from mplug.slots import PLAIN, Unmet

YES = "it would do"
"""The last output of a subprocess whose plugin can serve the run; a plugin that exits on import prints nothing."""
TIMEOUT = 60
"""Maximum time in seconds for one plugin."""


def kernels_that_would_do(config: RunConfig, unmet: Unmet) -> str:
    """The end of the error message: the installed plugins that can supply the slot instead, or else plain torch."""
    chosen = unmet.plugin.partition("/")[2]
    others = [name for name in Registry().names("kernels") if name != chosen]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda name: _would_do(config, unmet.kind, name), others)
    able = [name for name, would_do in zip(others, answers, strict=True) if would_do]
    if able:
        return f"; {listed(able)} would do: set kernels.{unmet.kind}={able[0]}"
    if unmet.plugin != PLAIN and _can_be_built(_with_kernel(config, unmet.kind, None)):  # imports no other plugin
        return f"; no other installed kernel would do; set kernels.{unmet.kind}=null for the composition in plain torch"
    return "; no other installed kernel would do, nor would the composition in plain torch"


def _with_kernel(config: RunConfig, kind: str, name: str | None) -> dict[str, Any]:
    settings = config.resolved()
    return {**settings, "kernels": {**settings["kernels"], kind: name}}


def _would_do(config: RunConfig, kind: str, name: str) -> bool:
    settings = _with_kernel(config, kind, name)
    command = [sys.executable, "-m", "mplug.alternatives"]
    try:
        finished = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False
    return finished.stdout.endswith(f"{YES}\n")


def _can_be_built(settings: dict[str, Any]) -> bool:
    """Whether the chosen kernels can serve the run of a whole config."""
    from mplug.build import unmet_reasons  # imports torch
    from mplug.run import prepare

    try:
        return not unmet_reasons(prepare(resolve(Registry(), from_mapping(settings, "the run's config"), {})))
    except UsageError:
        return False


def main() -> None:
    """Print whether the config on standard input can be built."""
    print(YES if _can_be_built(json.load(sys.stdin)) else "no")


if __name__ == "__main__":
    main()
