"""The names of the host that a plugin of kind `commands` may use: configs, launching processes, models and steps.

The names are imported when they are first used, because some of them import torch or pydantic.
"""

from typing import TYPE_CHECKING

from mplug.lazy import publish

if TYPE_CHECKING:
    from mplug.cli.options import config_options as config_options
    from mplug.cli.options import overrides as overrides
    from mplug.cli.tables import table as table
    from mplug.config.defaults import default_settings as default_settings
    from mplug.config.sources import Settings as Settings
    from mplug.config.sources import merge as merge
    from mplug.config.sources import read_assignments as read_assignments
    from mplug.config.sources import read_file as read_file
    from mplug.distributed.launch import Stopped as Stopped
    from mplug.distributed.launch import launch as launch
    from mplug.distributed.signals import Signals as Signals
    from mplug.distributed.supervision import Send as Send
    from mplug.distributed.world import launched as launched
    from mplug.errors import listed as listed
    from mplug.gradients.precision import DTYPES as DTYPES
    from mplug.model.build import build_model as build_model
    from mplug.model.build import choose_device as choose_device
    from mplug.model.build import measure_bytes as measure_bytes
    from mplug.model.compilation import compiled_graphs as compiled_graphs
    from mplug.registry.entry_points import Registry as Registry
    from mplug.registry.resolve import resolve as resolve
    from mplug.run.prepare import prepare as prepare
    from mplug.training.assembly import build as build
    from mplug.training.hardware import peak_memory_gib as peak_memory_gib
    from mplug.training.hardware import peak_tflops as peak_tflops
    from mplug.training.hardware import timed as timed
    from mplug.training.job import among as among
    from mplug.training.job import supervisor_of as supervisor_of
    from mplug.training.loop import launch_step as launch_step

publish(
    __name__,
    {
        "mplug.cli.options": ("config_options", "overrides"),
        "mplug.cli.tables": ("table",),
        "mplug.config.defaults": ("default_settings",),
        "mplug.config.sources": ("Settings", "merge", "read_assignments", "read_file"),
        "mplug.distributed.launch": ("Stopped", "launch"),
        "mplug.distributed.signals": ("Signals",),
        "mplug.distributed.supervision": ("Send",),
        "mplug.distributed.world": ("launched",),
        "mplug.errors": ("listed",),
        "mplug.gradients.precision": ("DTYPES",),
        "mplug.model.build": ("build_model", "choose_device", "measure_bytes"),
        "mplug.model.compilation": ("compiled_graphs",),
        "mplug.registry.entry_points": ("Registry",),
        "mplug.registry.resolve": ("resolve",),
        "mplug.run.prepare": ("prepare",),
        "mplug.training.assembly": ("build",),
        "mplug.training.hardware": ("peak_memory_gib", "peak_tflops", "timed"),
        "mplug.training.job": ("among", "supervisor_of"),
        "mplug.training.loop": ("launch_step",),
    },
)
