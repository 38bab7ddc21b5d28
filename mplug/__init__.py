"""mplug trains large transformers; every part that someone might want to replace is a plugin.

Plugin authors import this module, `mplug.ops`, `mplug.tensors`, `mplug_nn` and `mplug_testing`. This module imports no
torch.
"""

from typing import TYPE_CHECKING

from mplug import hookspecs as _hookspecs  # noqa: F401 (fills the table of specifications)
from mplug.lazy import publish
from mplug.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.checkpoint.foreign import ForeignCheckpoint as ForeignCheckpoint
    from mplug.checkpoint.foreign import ForeignTensor as ForeignTensor
    from mplug.checkpoint.weight_decoders import WeightDecoder as WeightDecoder
    from mplug.config.binding import RunConfig as RunConfig
    from mplug.config.public_fields import SHARED_FIELDS as SHARED_FIELDS
    from mplug.config.public_fields import unused as unused
    from mplug.config.public_form import FixedField as FixedField
    from mplug.config.public_form import PublicField as PublicField
    from mplug.config.public_form import PublicForm as PublicForm
    from mplug.config.public_form import PublicSettings as PublicSettings
    from mplug.config.public_form import ReadField as ReadField
    from mplug.config.public_form import SumField as SumField
    from mplug.config.public_form import UnusedField as UnusedField
    from mplug.config.public_form import Values as Values
    from mplug.config.sum_format import SumFormat as SumFormat
    from mplug.contracts import MAY_CHANGE as MAY_CHANGE
    from mplug.contracts import MAY_MOVE as MAY_MOVE
    from mplug.contracts import OF_TRAINING as OF_TRAINING
    from mplug.contracts import CorpusTokenizer as CorpusTokenizer
    from mplug.contracts import FolderTokenizer as FolderTokenizer
    from mplug.contracts import Loader as Loader
    from mplug.contracts import MicroBatch as MicroBatch
    from mplug.contracts import Optimizer as Optimizer
    from mplug.contracts import Piece as Piece
    from mplug.contracts import Record as Record
    from mplug.contracts import Relay as Relay
    from mplug.contracts import Stateful as Stateful
    from mplug.contracts import Stepper as Stepper
    from mplug.contracts import StepResult as StepResult
    from mplug.contracts import StepScalars as StepScalars
    from mplug.contracts import Tokenizer as Tokenizer
    from mplug.contracts import Variance as Variance
    from mplug.contracts import distinct as distinct
    from mplug.errors import RunError as RunError
    from mplug.errors import UsageError as UsageError
    from mplug.files import sync_file as sync_file
    from mplug.files import sync_path as sync_path
    from mplug.files import write_whole as write_whole
    from mplug.gradients.owned_memory import Shard as Shard
    from mplug.gradients.owned_memory import Shards as Shards
    from mplug.gradients.precision import DTYPES as DTYPES
    from mplug.gradients.sinks import GradientSink as GradientSink
    from mplug.gradients.sinks import Sinks as Sinks
    from mplug.layout.actions import Action as Action
    from mplug.layout.actions import Kind as Kind
    from mplug.layout.actions import Shape as Shape
    from mplug.layout.actions import Table as Table
    from mplug.layout.actions import forward_half as forward_half
    from mplug.layout.actions import with_transfers as with_transfers
    from mplug.layout.external import ExternalMap as ExternalMap
    from mplug.layout.external import ExternalNames as ExternalNames
    from mplug.layout.external import Factor as Factor
    from mplug.layout.external import Fused as Fused
    from mplug.layout.external import Interleaved as Interleaved
    from mplug.layout.external import Link as Link
    from mplug.layout.external import Part as Part
    from mplug.layout.external import Transposed as Transposed
    from mplug.layout.gathered import GatheredPlacement as GatheredPlacement
    from mplug.layout.mesh import Axis as Axis
    from mplug.layout.mesh import IndexMap as IndexMap
    from mplug.layout.mesh import Mesh as Mesh
    from mplug.layout.mesh import contiguous as contiguous
    from mplug.layout.ownership import Bucket as Bucket
    from mplug.layout.ownership import Engine as Engine
    from mplug.layout.ownership import Sharding as Sharding
    from mplug.layout.ownership import Stretch as Stretch
    from mplug.layout.placement import Box as Box
    from mplug.layout.placement import Placement as Placement
    from mplug.layout.plan import Buffer as Buffer
    from mplug.layout.plan import Flops as Flops
    from mplug.layout.plan import Init as Init
    from mplug.layout.plan import Parameter as Parameter
    from mplug.layout.plan import Plan as Plan
    from mplug.layout.plan import Segment as Segment
    from mplug.layout.plan import Shift as Shift
    from mplug.layout.plan import Stages as Stages
    from mplug.layout.plan import Unit as Unit
    from mplug.layout.ranks import Grouping as Grouping
    from mplug.layout.ranks import Ranks as Ranks
    from mplug.model.adapters import Adapters as Adapters
    from mplug.model.adapters import Merge as Merge
    from mplug.model.adapters import RowNorms as RowNorms
    from mplug.model.adapters import row_norms as row_norms
    from mplug.model.delayed_scaling import DelayedScaling as DelayedScaling
    from mplug.model.gathered_copies import GatheredCopies as GatheredCopies
    from mplug.model.gathered_copies import gathered_copies as gathered_copies
    from mplug.model.kernel import kernel as kernel
    from mplug.model.model import Model as Model
    from mplug.model.offers import UNIT as UNIT
    from mplug.model.offers import Offer as Offer
    from mplug.model.offers import Site as Site
    from mplug.model.offers import Wrap as Wrap
    from mplug.model.slot_buffer import SlotBuffer as SlotBuffer
    from mplug.model.weight_gradients import WeightGradients as WeightGradients
    from mplug.precision import Precision as Precision
    from mplug.precision import Recipe as Recipe
    from mplug.precision import rounding_of_sums as rounding_of_sums
    from mplug.registry.schedules import find_schedule as find_schedule
    from mplug.registry.schedules import proven_table as proven_table
    from mplug.registry.specification import hookimpl as hookimpl
    from mplug.registry.tokenizers import TokenizerRecord as TokenizerRecord
    from mplug.registry.tokenizers import describe_tokenizer as describe_tokenizer
    from mplug.registry.tokenizers import keep_tokenizer as keep_tokenizer
    from mplug.registry.tokenizers import load_tokenizer as load_tokenizer
    from mplug.registry.tokenizers import read_tokenizer as read_tokenizer
    from mplug.run.run import Run as Run
    from mplug.run.toolchain import triton_builds as triton_builds
    from mplug.slots import Slot as Slot
    from mplug.slots import set_defaults as set_defaults
    from mplug.slots import slots_named as slots_named
    from mplug.slots import slots_of as slots_of
    from mplug.training.map_loader import MapLoader as MapLoader
    from mplug.training.stepper import DefaultStepper as DefaultStepper
    from mplug.training.torch_optimizer import TorchOptimizer as TorchOptimizer

publish(
    __name__,
    {
        "mplug.checkpoint.foreign": (
            "ForeignCheckpoint",
            "ForeignTensor",
        ),
        "mplug.checkpoint.weight_decoders": ("WeightDecoder",),
        "mplug.config.binding": ("RunConfig",),
        "mplug.config.public_fields": (
            "SHARED_FIELDS",
            "unused",
        ),
        "mplug.config.public_form": (
            "FixedField",
            "PublicField",
            "PublicForm",
            "PublicSettings",
            "ReadField",
            "SumField",
            "UnusedField",
            "Values",
        ),
        "mplug.config.sum_format": ("SumFormat",),
        "mplug.contracts": (
            "CorpusTokenizer",
            "FolderTokenizer",
            "Loader",
            "MAY_CHANGE",
            "MAY_MOVE",
            "OF_TRAINING",
            "MicroBatch",
            "Optimizer",
            "Piece",
            "Record",
            "Stateful",
            "StepResult",
            "StepScalars",
            "Relay",
            "Stepper",
            "Tokenizer",
            "Variance",
            "distinct",
        ),
        "mplug.errors": (
            "RunError",
            "UsageError",
        ),
        "mplug.files": (
            "sync_file",
            "sync_path",
            "write_whole",
        ),
        "mplug.gradients.owned_memory": (
            "Shard",
            "Shards",
        ),
        "mplug.gradients.precision": ("DTYPES",),
        "mplug.gradients.sinks": (
            "GradientSink",
            "Sinks",
        ),
        "mplug.layout.actions": (
            "Action",
            "Kind",
            "Shape",
            "Table",
            "forward_half",
            "with_transfers",
        ),
        "mplug.layout.external": (
            "ExternalMap",
            "ExternalNames",
            "Factor",
            "Fused",
            "Interleaved",
            "Link",
            "Part",
            "Transposed",
        ),
        "mplug.layout.gathered": ("GatheredPlacement",),
        "mplug.layout.mesh": (
            "Axis",
            "IndexMap",
            "Mesh",
            "contiguous",
        ),
        "mplug.layout.ownership": (
            "Bucket",
            "Engine",
            "Sharding",
            "Stretch",
        ),
        "mplug.layout.placement": (
            "Box",
            "Placement",
        ),
        "mplug.layout.plan": (
            "Buffer",
            "Flops",
            "Init",
            "Parameter",
            "Plan",
            "Segment",
            "Shift",
            "Stages",
            "Unit",
        ),
        "mplug.layout.ranks": (
            "Grouping",
            "Ranks",
        ),
        "mplug.model.adapters": (
            "Adapters",
            "Merge",
            "RowNorms",
            "row_norms",
        ),
        "mplug.model.delayed_scaling": ("DelayedScaling",),
        "mplug.model.gathered_copies": (
            "GatheredCopies",
            "gathered_copies",
        ),
        "mplug.model.kernel": ("kernel",),
        "mplug.model.model": ("Model",),
        "mplug.model.offers": (
            "Offer",
            "Site",
            "UNIT",
            "Wrap",
        ),
        "mplug.model.slot_buffer": ("SlotBuffer",),
        "mplug.model.weight_gradients": ("WeightGradients",),
        "mplug.precision": (
            "Precision",
            "Recipe",
            "rounding_of_sums",
        ),
        "mplug.registry.schedules": (
            "find_schedule",
            "proven_table",
        ),
        "mplug.registry.specification": ("hookimpl",),
        "mplug.registry.tokenizers": (
            "TokenizerRecord",
            "describe_tokenizer",
            "keep_tokenizer",
            "load_tokenizer",
            "read_tokenizer",
        ),
        "mplug.run.run": ("Run",),
        "mplug.run.toolchain": ("triton_builds",),
        "mplug.slots": (
            "Slot",
            "set_defaults",
            "slots_named",
            "slots_of",
        ),
        "mplug.training.map_loader": ("MapLoader",),
        "mplug.training.stepper": ("DefaultStepper",),
        "mplug.training.torch_optimizer": ("TorchOptimizer",),
    },
)
