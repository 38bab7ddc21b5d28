"""The names of the host that a plugin of kind `commands` may use: configs, launching processes, models and steps.

A command may build the model of a run for something else than training. It passes an object with hooks of its own to
`prepare(config, {f"{COMMAND}NAME": object})`, and sets `run.trains = False` if the model only runs forward: the model
then has no trained parameter and no optimizer. `build_model` calls the hooks, also those of the object, on every rank:
in `adapt_model` it may change what sites need, and in `offers_selected` which needs must be met.

`mplug_pretrained.SavedModel` finds the weights of a run or of a published folder, and loads them under any layout. With
`allocate_parts`, the model has memory alone. With `allocate_forward`, strategies that gather weights take part too, and
`forward_stepper` evaluates the model on the micro batches of a `feed`, as training does.

The names are imported when they are first used, because some of them import torch or pydantic.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug.cli.groups import OpenGroup as OpenGroup
    from mplug.cli.hints import assignment_hint as assignment_hint
    from mplug.cli.options import Finite as Finite
    from mplug.cli.options import PluginName as PluginName
    from mplug.cli.options import RunName as RunName
    from mplug.cli.options import StoredPath as StoredPath
    from mplug.cli.options import UserPath as UserPath
    from mplug.cli.options import config_options as config_options
    from mplug.cli.options import overrides as overrides
    from mplug.cli.options import resolved as resolved
    from mplug.cli.tables import human_bytes as human_bytes
    from mplug.cli.tables import table as table
    from mplug.config.defaults import default_settings as default_settings
    from mplug.config.defaults import saved_settings as saved_settings
    from mplug.config.sources import Settings as Settings
    from mplug.config.sources import from_mapping as from_mapping
    from mplug.config.sources import merge as merge
    from mplug.config.sources import read_assignments as read_assignments
    from mplug.config.sources import read_file as read_file
    from mplug.distributed.signals import Signals as Signals
    from mplug.distributed.supervision import Send as Send
    from mplug.distributed.world import World as World
    from mplug.errors import listed as listed
    from mplug.layout.names import modules_around as modules_around
    from mplug.layout.names import role_of as role_of
    from mplug.model.build import allocate_parts as allocate_parts
    from mplug.model.build import build_model as build_model
    from mplug.model.build import choose_device as choose_device
    from mplug.model.build import unmet_reasons as unmet_reasons
    from mplug.model.slots.fill import contents_of as contents_of
    from mplug.model.slots.fill import select_offers as select_offers
    from mplug.model.slots.offers import Filled as Filled
    from mplug.model.slots.selection import Selection as Selection
    from mplug.model.slots.selection import offered_in_plain_torch as offered_in_plain_torch
    from mplug.model.units import AS_THEY_ARE as AS_THEY_ARE
    from mplug.model.units import Instead as Instead
    from mplug.model.units import run_units as run_units
    from mplug.model.updates import IN_CPU_MEMORY as IN_CPU_MEMORY
    from mplug.registry.entry_points import Registry as Registry
    from mplug.registry.entry_points import refuse_other_versions as refuse_other_versions
    from mplug.registry.hooks import COMMAND as COMMAND
    from mplug.registry.resolve import resolve as resolve
    from mplug.run.folder import RUNS as RUNS
    from mplug.run.folder import all_directories as all_directories
    from mplug.run.folder import directory_at as directory_at
    from mplug.run.folder import find_directory as find_directory
    from mplug.run.launching import Stopped as Stopped
    from mplug.run.launching import launch as launch
    from mplug.run.launching import launched as launched
    from mplug.run.prepare import prepare as prepare
    from mplug.training.assembly import allocate_forward as allocate_forward
    from mplug.training.assembly import build as build
    from mplug.training.assembly import feed as feed
    from mplug.training.assembly import forward_stepper as forward_stepper
    from mplug.training.hardware import peak_memory_gib as peak_memory_gib
    from mplug.training.hardware import peak_tflops as peak_tflops
    from mplug.training.job import COLLECTIVE_SECONDS as COLLECTIVE_SECONDS
    from mplug.training.job import among as among
    from mplug.training.job import settle as settle
    from mplug.training.job import supervisor_of as supervisor_of
    from mplug.training.loop import launch_step as launch_step

publish(__name__)
