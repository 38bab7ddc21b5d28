"""mplug trains large transformers; every part that someone might want to replace is a plugin.

Plugin authors import this module, `mplug.nn`, `mplug.ops` and `mplug.testing`. This module does not import torch.
"""

from typing import TYPE_CHECKING, Any

from mplug import hookspecs as _hookspecs  # noqa: F401 (fills the table of specifications)
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
from mplug.layout.gathered import GatheredPlacement
from mplug.layout.mesh import Axis, IndexMap, Mesh, contiguous
from mplug.layout.ownership import Bucket, Sharding, Stretch
from mplug.layout.placement import Box, Placement
from mplug.layout.plan import Buffer, Flops, Init, Parameter, Plan, Segment, Stages, Unit
from mplug.model.offers import UNIT, Offer, Site, Wrap
from mplug.registry.specification import hookimpl
from mplug.run.toolchain import triton_builds
from mplug.slot_kinds import slots_named
from mplug.training.map_loader import MapLoader
from mplug.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.gradients.owned_memory import Shard, Shards
    from mplug.gradients.sinks import GradientSink, Sinks
    from mplug.model.model import Model
    from mplug.registry.tokenizers import (
        TokenizerRecord,
        describe_tokenizer,
        keep_tokenizer,
        load_tokenizer,
        read_tokenizer,
    )
    from mplug.run.run import Run
    from mplug.training.stepper import DefaultStepper

_LATE = {
    "DefaultStepper": "mplug.training.stepper",
    "GradientSink": "mplug.gradients.sinks",
    "Model": "mplug.model.model",
    "Run": "mplug.run.run",
    "RunConfig": "mplug.config.binding",
    "Shard": "mplug.gradients.owned_memory",
    "Shards": "mplug.gradients.owned_memory",
    "Sinks": "mplug.gradients.sinks",
    "TokenizerRecord": "mplug.registry.tokenizers",
    "describe_tokenizer": "mplug.registry.tokenizers",
    "keep_tokenizer": "mplug.registry.tokenizers",
    "load_tokenizer": "mplug.registry.tokenizers",
    "read_tokenizer": "mplug.registry.tokenizers",
}
"""Names whose modules are slow to import (torch, pydantic); `__getattr__` imports them on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'mplug' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)


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
    "triton_builds",
]
