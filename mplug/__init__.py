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
from mplug.gathering import GatheredPlacement
from mplug.loading import MapLoader
from mplug.mesh import Axis, IndexMap, Mesh, contiguous
from mplug.plan import Box, Buffer, Flops, Init, Parameter, Placement, Plan, Segment, Stages, Unit
from mplug.sharding import Bucket, Sharding, Stretch
from mplug.slots import UNIT, Offer, Site, Wrap, slots_named
from mplug.specification import hookimpl
from mplug.toolchain import triton_builds
from mplug.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.config import RunConfig
    from mplug.gradients import GradientSink, Sinks
    from mplug.model import Model
    from mplug.run import Run
    from mplug.shards import Shard, Shards
    from mplug.stepper import DefaultStepper
    from mplug.tokenization import (
        TokenizerRecord,
        describe_tokenizer,
        keep_tokenizer,
        load_tokenizer,
        read_tokenizer,
    )

_LATE = {
    "DefaultStepper": "mplug.stepper",
    "GradientSink": "mplug.gradients",
    "Model": "mplug.model",
    "Run": "mplug.run",
    "RunConfig": "mplug.config",
    "Shard": "mplug.shards",
    "Shards": "mplug.shards",
    "Sinks": "mplug.gradients",
    "TokenizerRecord": "mplug.tokenization",
    "describe_tokenizer": "mplug.tokenization",
    "keep_tokenizer": "mplug.tokenization",
    "load_tokenizer": "mplug.tokenization",
    "read_tokenizer": "mplug.tokenization",
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
