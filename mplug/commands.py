"""The names of the host that a plugin of kind `commands` may use: configs, launching processes, models and steps.

The names are imported when they are first used, because some of them import torch or pydantic.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mplug.cli.options import config_options, overrides
    from mplug.cli.tables import table
    from mplug.config.defaults import default_settings
    from mplug.config.sources import Settings, merge, read_assignments, read_file
    from mplug.distributed.heartbeats import Beat
    from mplug.distributed.launch import Stopped, launch
    from mplug.distributed.signals import Signals
    from mplug.distributed.world import launched
    from mplug.errors import listed
    from mplug.gradients.precision import DTYPES
    from mplug.model.build import build_model, choose_device, measure_bytes
    from mplug.model.compilation import compiled_graphs
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare
    from mplug.training.assembly import build
    from mplug.training.hardware import peak_memory_gib, peak_tflops, timed
    from mplug.training.job import among
    from mplug.training.loop import launch_step

_MODULES = {
    "Beat": "mplug.distributed.heartbeats",
    "DTYPES": "mplug.gradients.precision",
    "Registry": "mplug.registry.entry_points",
    "Settings": "mplug.config.sources",
    "Signals": "mplug.distributed.signals",
    "Stopped": "mplug.distributed.launch",
    "among": "mplug.training.job",
    "build": "mplug.training.assembly",
    "build_model": "mplug.model.build",
    "choose_device": "mplug.model.build",
    "compiled_graphs": "mplug.model.compilation",
    "config_options": "mplug.cli.options",
    "default_settings": "mplug.config.defaults",
    "launch": "mplug.distributed.launch",
    "launch_step": "mplug.training.loop",
    "launched": "mplug.distributed.world",
    "listed": "mplug.errors",
    "measure_bytes": "mplug.model.build",
    "merge": "mplug.config.sources",
    "overrides": "mplug.cli.options",
    "peak_memory_gib": "mplug.training.hardware",
    "peak_tflops": "mplug.training.hardware",
    "prepare": "mplug.run.prepare",
    "read_assignments": "mplug.config.sources",
    "read_file": "mplug.config.sources",
    "resolve": "mplug.registry.resolve",
    "table": "mplug.cli.tables",
    "timed": "mplug.training.hardware",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mplug.commands' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


__all__ = [
    "DTYPES",
    "Beat",
    "Registry",
    "Settings",
    "Signals",
    "Stopped",
    "among",
    "build",
    "build_model",
    "choose_device",
    "compiled_graphs",
    "config_options",
    "default_settings",
    "launch",
    "launch_step",
    "launched",
    "listed",
    "measure_bytes",
    "merge",
    "overrides",
    "peak_memory_gib",
    "peak_tflops",
    "prepare",
    "read_assignments",
    "read_file",
    "resolve",
    "table",
    "timed",
]
