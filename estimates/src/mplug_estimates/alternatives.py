"""Find installed kernel plugins that can replace one that cannot serve a slot; an error message proposes them.

Each plugin is tried in a process of its own (`python -m mplug_estimates.kernel_trial`), so that a plugin that fails
to import or hangs has no effect on this one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mplug.config.binding import RunConfig
from mplug.config.sources import from_mapping
from mplug.errors import UsageError, listed
from mplug.model.build import unmet_reasons
from mplug.model.slots.offers import PLAIN, Unmet
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare

TRIAL = "mplug_estimates.kernel_trial"
"""The module that a trial's process runs; it imports torch and the plugins that the config names."""
TIMEOUT = 60
"""Seconds that a plugin may take to answer."""
YES = "the kernel can serve the model"
"""The last line of the output if the kernels can serve the model. A plugin that exits at import never prints it."""


def kernels_that_would_do(config: RunConfig, unmet: Unmet) -> str:
    """The end of an error message: which installed plugins can supply the slot instead, or whether plain torch can.

    Plain torch is tried in this process, kernel plugins are not, because they may fail to import.
    """
    chosen = unmet.plugin.partition("/")[2]
    candidates = [name for name in Registry.of_process().names("kernels") if name != chosen]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # each process imports torch
        results = list(pool.map(lambda name: _can_serve(config, unmet.kind, name), candidates))
    able = [name for name, can_serve in zip(candidates, results, strict=True) if can_serve]
    silent = [name for name, can_serve in zip(candidates, results, strict=True) if can_serve is None]
    none = "no other installed kernel can"
    if silent:
        none = f"{listed(silent)} gave no answer within {TIMEOUT:g} s, and {none}"
    fast = [label.rpartition("/")[2] for label in config.kernels.defaults]
    able.sort(key=lambda name: fast.index(name) if name in fast else len(fast))
    if able:
        return f"; {listed(able)} can serve it: set kernels.{unmet.kind}={able[0]}"
    if unmet.plugin != PLAIN and can_be_built(_with_kernel(config, unmet.kind, None)):
        return f"; {none}; set kernels.{unmet.kind}=null for the composition in plain torch"
    return f"; {none}, and neither can the composition in plain torch"


def _with_kernel(config: RunConfig, kind: str, name: str | None) -> dict[str, Any]:
    settings = config.resolved()
    return {**settings, "kernels": {**settings["kernels"], kind: name}}


def _can_serve(config: RunConfig, kind: str, name: str) -> bool | None:
    """Whether a kernel plugin can serve the model; None if it gives no answer in time."""
    settings = _with_kernel(config, kind, name)
    command = [sys.executable, "-m", TRIAL]
    try:
        finished = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    return finished.stdout.endswith(f"{YES}\n")


def can_be_built(settings: Mapping[str, Any]) -> bool:
    """Whether the kernels of a whole config can serve its model."""
    try:
        return not unmet_reasons(
            prepare(resolve(Registry.of_process(), from_mapping(settings, "the run's config"), {}))
        )
    except UsageError:
        return False
