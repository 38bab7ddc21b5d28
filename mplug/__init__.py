"""mplug trains large transformers; every part that someone might want to replace is a plugin.

Plugin authors import this module, `mplug.nn`, `mplug.ops` and `mplug.testing`. This module does not import torch.
"""

from typing import TYPE_CHECKING, Any

from mplug import hookspecs as _hookspecs  # noqa: F401 (fills the table of specifications)
from mplug.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.contracts import (
        MAY_CHANGE,
        MAY_MOVE,
        CorpusTokenizer,
        Loader,
        MicroBatch,
        Optimizer,
        Piece,
        Record,
        Stateful,
        Stepper,
        StepResult,
        StepScalars,
        Tokenizer,
        Variance,
    )
    from mplug.errors import RunError, UsageError
    from mplug.files import sync_file, sync_path, write_whole
    from mplug.gradients.owned_memory import Shard, Shards
    from mplug.gradients.sinks import GradientSink, Sinks
    from mplug.layout.gathered import GatheredPlacement
    from mplug.layout.mesh import Axis, IndexMap, Mesh, contiguous
    from mplug.layout.ownership import Bucket, Sharding, Stretch
    from mplug.layout.placement import Box, Placement
    from mplug.layout.plan import Buffer, Flops, Init, Parameter, Plan, Segment, Stages, Unit
    from mplug.model.model import Model
    from mplug.model.offers import UNIT, Offer, Site, Wrap
    from mplug.registry.specification import hookimpl
    from mplug.registry.tokenizers import (
        TokenizerRecord,
        describe_tokenizer,
        keep_tokenizer,
        load_tokenizer,
        read_tokenizer,
    )
    from mplug.run.run import Run
    from mplug.run.toolchain import triton_builds
    from mplug.slot_kinds import slots_named
    from mplug.training.map_loader import MapLoader
    from mplug.training.stepper import DefaultStepper

_MODULES = {
    "Axis": "mplug.layout.mesh",
    "Box": "mplug.layout.placement",
    "Bucket": "mplug.layout.ownership",
    "Buffer": "mplug.layout.plan",
    "CorpusTokenizer": "mplug.contracts",
    "DefaultStepper": "mplug.training.stepper",
    "Flops": "mplug.layout.plan",
    "GatheredPlacement": "mplug.layout.gathered",
    "GradientSink": "mplug.gradients.sinks",
    "IndexMap": "mplug.layout.mesh",
    "Init": "mplug.layout.plan",
    "Loader": "mplug.contracts",
    "MAY_CHANGE": "mplug.contracts",
    "MAY_MOVE": "mplug.contracts",
    "MapLoader": "mplug.training.map_loader",
    "Mesh": "mplug.layout.mesh",
    "MicroBatch": "mplug.contracts",
    "Model": "mplug.model.model",
    "Offer": "mplug.model.offers",
    "Optimizer": "mplug.contracts",
    "Parameter": "mplug.layout.plan",
    "Piece": "mplug.contracts",
    "Placement": "mplug.layout.placement",
    "Plan": "mplug.layout.plan",
    "Record": "mplug.contracts",
    "Run": "mplug.run.run",
    "RunConfig": "mplug.config.binding",
    "RunError": "mplug.errors",
    "Segment": "mplug.layout.plan",
    "Shard": "mplug.gradients.owned_memory",
    "Sharding": "mplug.layout.ownership",
    "Shards": "mplug.gradients.owned_memory",
    "Sinks": "mplug.gradients.sinks",
    "Site": "mplug.model.offers",
    "Stages": "mplug.layout.plan",
    "Stateful": "mplug.contracts",
    "StepResult": "mplug.contracts",
    "StepScalars": "mplug.contracts",
    "Stepper": "mplug.contracts",
    "Stretch": "mplug.layout.ownership",
    "Tokenizer": "mplug.contracts",
    "TokenizerRecord": "mplug.registry.tokenizers",
    "UNIT": "mplug.model.offers",
    "Unit": "mplug.layout.plan",
    "UsageError": "mplug.errors",
    "Variance": "mplug.contracts",
    "Wrap": "mplug.model.offers",
    "contiguous": "mplug.layout.mesh",
    "describe_tokenizer": "mplug.registry.tokenizers",
    "hookimpl": "mplug.registry.specification",
    "keep_tokenizer": "mplug.registry.tokenizers",
    "load_tokenizer": "mplug.registry.tokenizers",
    "read_tokenizer": "mplug.registry.tokenizers",
    "slots_named": "mplug.slot_kinds",
    "sync_file": "mplug.files",
    "sync_path": "mplug.files",
    "triton_builds": "mplug.run.toolchain",
    "write_whole": "mplug.files",
}
"""Each public name and its module, which is imported when the name is first used: most commands need few of them."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mplug' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


__all__ = [
    "MAY_CHANGE",
    "MAY_MOVE",
    "UNIT",
    "Axis",
    "Box",
    "Bucket",
    "Buffer",
    "CorpusTokenizer",
    "DefaultStepper",
    "Flops",
    "GatheredPlacement",
    "GradientSink",
    "IndexMap",
    "Init",
    "Loader",
    "MapLoader",
    "Mesh",
    "MicroBatch",
    "Model",
    "Offer",
    "Optimizer",
    "Parameter",
    "Piece",
    "Placement",
    "Plan",
    "Record",
    "Run",
    "RunConfig",
    "RunError",
    "Segment",
    "Shard",
    "Sharding",
    "Shards",
    "Sinks",
    "Site",
    "Stages",
    "Stateful",
    "StepResult",
    "StepScalars",
    "Stepper",
    "Stretch",
    "Tokenizer",
    "TokenizerRecord",
    "Unit",
    "UsageError",
    "Variance",
    "Wrap",
    "contiguous",
    "describe_tokenizer",
    "hookimpl",
    "keep_tokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "slots_named",
    "sync_file",
    "sync_path",
    "triton_builds",
    "write_whole",
]
