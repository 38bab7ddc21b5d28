"""mplug trains large transformers; every part that someone might want to replace is a plugin.

Plugin authors import this module, `mplug.ops`, `mplug.tensors`, `mplug.commands`, `mplug_graphs`, `mplug_nn`,
`mplug_sampling`, `mplug_schedules`, `mplug_testing` and `mplug_tokenization`. This module imports no torch.
"""

from typing import TYPE_CHECKING

from mplug import hookspecs as _hookspecs  # noqa: F401 (fills the table of specifications)
from mplug.system.lazy import publish
from mplug.system.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.checkpoint.adapter_files import adapter_conversion as adapter_conversion
    from mplug.checkpoint.adapter_files import adapters_of as adapters_of
    from mplug.checkpoint.external_form import conversion as conversion
    from mplug.checkpoint.foreign import ForeignCheckpoint as ForeignCheckpoint
    from mplug.checkpoint.foreign import ForeignTensor as ForeignTensor
    from mplug.checkpoint.format import Format as Format
    from mplug.checkpoint.own_folders import Gatherer as Gatherer
    from mplug.checkpoint.published import Export as Export
    from mplug.checkpoint.published import ExportOptions as ExportOptions
    from mplug.checkpoint.published import ExportValues as ExportValues
    from mplug.checkpoint.published import FolderWeights as FolderWeights
    from mplug.checkpoint.published import PublishedFolder as PublishedFolder
    from mplug.checkpoint.reading import read_whole_header as read_whole_header
    from mplug.checkpoint.safetensors_file import write_safetensors as write_safetensors
    from mplug.checkpoint.wanted import Wanted as Wanted
    from mplug.config.binding import RunConfig as RunConfig
    from mplug.config.described import DescribedModel as DescribedModel
    from mplug.config.described import PublicSettings as PublicSettings
    from mplug.config.family import Family as Family
    from mplug.config.family import Source as Source
    from mplug.config.sum_format import SumFormat as SumFormat
    from mplug.contracts.fields import MAY_CHANGE as MAY_CHANGE
    from mplug.contracts.fields import MAY_MOVE as MAY_MOVE
    from mplug.contracts.fields import OF_TRAINING as OF_TRAINING
    from mplug.contracts.fields import distinct as distinct
    from mplug.contracts.loader import Loader as Loader
    from mplug.contracts.loader import Stateful as Stateful
    from mplug.contracts.micro_batch import DOCUMENTS as DOCUMENTS
    from mplug.contracts.micro_batch import IGNORED as IGNORED
    from mplug.contracts.micro_batch import LOSS_WEIGHTS as LOSS_WEIGHTS
    from mplug.contracts.micro_batch import MicroBatch as MicroBatch
    from mplug.contracts.micro_batch import RankBatch as RankBatch
    from mplug.contracts.optimizer import Optimizer as Optimizer
    from mplug.contracts.optimizer import Piece as Piece
    from mplug.contracts.optimizer import StepScalars as StepScalars
    from mplug.contracts.optimizer import WeightExchange as WeightExchange
    from mplug.contracts.stepper import Pipeline as Pipeline
    from mplug.contracts.stepper import Record as Record
    from mplug.contracts.stepper import Relay as Relay
    from mplug.contracts.stepper import Stepper as Stepper
    from mplug.contracts.stepper import StepResult as StepResult
    from mplug.contracts.streams import RETURNS as RETURNS
    from mplug.contracts.streams import STREAMS as STREAMS
    from mplug.contracts.streams import WHOLE_SEQUENCE as WHOLE_SEQUENCE
    from mplug.contracts.streams import Medium as Medium
    from mplug.contracts.streams import Processor as Processor
    from mplug.contracts.streams import Seen as Seen
    from mplug.contracts.tokenizer import CorpusTokenizer as CorpusTokenizer
    from mplug.contracts.tokenizer import FolderTokenizer as FolderTokenizer
    from mplug.contracts.tokenizer import Tokenizer as Tokenizer
    from mplug.contracts.variance import Variance as Variance
    from mplug.distributed.supervision import Hang as Hang
    from mplug.distributed.supervision import Monitor as Monitor
    from mplug.distributed.supervision import PluginMessage as PluginMessage
    from mplug.distributed.supervision import Send as Send
    from mplug.distributed.supervision import Supervisor as Supervisor
    from mplug.errors import RunError as RunError
    from mplug.errors import UsageError as UsageError
    from mplug.errors import brief as brief
    from mplug.errors import counted as counted
    from mplug.errors import listed as listed
    from mplug.errors import quoted as quoted
    from mplug.errors import some_names as some_names
    from mplug.gradients.owned_memory import Shard as Shard
    from mplug.gradients.sinks import GradientSink as GradientSink
    from mplug.gradients.sinks import Sinks as Sinks
    from mplug.layout.conversion import Conversion as Conversion
    from mplug.layout.conversion import conversion_of as conversion_of
    from mplug.layout.external import ExternalMap as ExternalMap
    from mplug.layout.external import ExternalNames as ExternalNames
    from mplug.layout.external import Factor as Factor
    from mplug.layout.external import Fused as Fused
    from mplug.layout.external import Interleaved as Interleaved
    from mplug.layout.external import Link as Link
    from mplug.layout.external import Part as Part
    from mplug.layout.external import Transposed as Transposed
    from mplug.layout.gathered import GatheredPlacement as GatheredPlacement
    from mplug.layout.inits import Entries as Entries
    from mplug.layout.inits import Inits as Inits
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
    from mplug.layout.plan import ENCODER_TEXTS as ENCODER_TEXTS
    from mplug.layout.plan import Answering as Answering
    from mplug.layout.plan import Buffer as Buffer
    from mplug.layout.plan import Init as Init
    from mplug.layout.plan import Parameter as Parameter
    from mplug.layout.plan import Plan as Plan
    from mplug.layout.plan import Segment as Segment
    from mplug.layout.plan import Shift as Shift
    from mplug.layout.plan import Stages as Stages
    from mplug.layout.plan import Stream as Stream
    from mplug.layout.plan import Unit as Unit
    from mplug.layout.plan_within import plan_within as plan_within
    from mplug.layout.ranks import Grouping as Grouping
    from mplug.layout.ranks import Ranks as Ranks
    from mplug.layout.work import ActivationProduct as ActivationProduct
    from mplug.layout.work import Branches as Branches
    from mplug.layout.work import Flops as Flops
    from mplug.layout.work import Step as Step
    from mplug.layout.work import WeightProduct as WeightProduct
    from mplug.layout.work import Window as Window
    from mplug.layout.work import Work as Work
    from mplug.model.model import Model as Model
    from mplug.model.plans.adapters import Adapters as Adapters
    from mplug.model.plans.adapters import Merge as Merge
    from mplug.model.plans.adapters import RowNorms as RowNorms
    from mplug.model.plans.adapters import row_norms as row_norms
    from mplug.model.plans.declaring import Declared as Declared
    from mplug.model.plans.declaring import declare as declare
    from mplug.model.plans.declaring import parameter as parameter
    from mplug.model.plans.description import Description as Description
    from mplug.model.plans.description import describe as describe
    from mplug.model.products.gathered_copies import GatheredCopies as GatheredCopies
    from mplug.model.products.gathered_copies import gathered_copies as gathered_copies
    from mplug.model.slots.declaration import Slot as Slot
    from mplug.model.slots.declaration import set_defaults as set_defaults
    from mplug.model.slots.declaration import slots_named as slots_named
    from mplug.model.slots.declaration import slots_of as slots_of
    from mplug.model.slots.kernel import kernel as kernel
    from mplug.model.slots.offers import UNIT as UNIT
    from mplug.model.slots.offers import Offer as Offer
    from mplug.model.slots.offers import Site as Site
    from mplug.model.slots.offers import Wrap as Wrap
    from mplug.model.slots.slot_buffer import SlotBuffer as SlotBuffer
    from mplug.precisions.dtypes import FORMATS as FORMATS
    from mplug.precisions.precision import Precision as Precision
    from mplug.precisions.precision import Recipe as Recipe
    from mplug.precisions.precision import rounding_of_sums as rounding_of_sums
    from mplug.registry.implementation import hookimpl as hookimpl
    from mplug.registry.open_lists import OpenList as OpenList
    from mplug.registry.stores import local_path as local_path
    from mplug.registry.stores import local_prefix as local_prefix
    from mplug.run.activity import READING as READING
    from mplug.run.activity import Activity as Activity
    from mplug.run.metrics_file import read_records as read_records
    from mplug.run.metrics_file import scalars as scalars
    from mplug.run.run import Run as Run
    from mplug.run.toolchain import triton_builds as triton_builds
    from mplug.system.files import sync_file as sync_file
    from mplug.system.files import sync_path as sync_path
    from mplug.system.files import write_whole as write_whole
    from mplug.tensors.supplier import Statements as Statements
    from mplug.tensors.supplier import Supplier as Supplier
    from mplug.tensors.supplier import statements_of as statements_of
    from mplug.training.evaluator import Evaluator as Evaluator
    from mplug.training.map_loader import MapLoader as MapLoader
    from mplug.training.stepper import DefaultStepper as DefaultStepper
    from mplug.training.torch_optimizer import TorchOptimizer as TorchOptimizer

publish(
    __name__,
    {
        "mplug.checkpoint.adapter_files": ("adapter_conversion", "adapters_of"),
        "mplug.checkpoint.external_form": ("conversion",),
        "mplug.checkpoint.foreign": ("ForeignCheckpoint", "ForeignTensor"),
        "mplug.checkpoint.format": ("Format",),
        "mplug.checkpoint.own_folders": ("Gatherer",),
        "mplug.checkpoint.published": ("Export", "ExportOptions", "ExportValues", "FolderWeights", "PublishedFolder"),
        "mplug.checkpoint.reading": ("read_whole_header",),
        "mplug.checkpoint.safetensors_file": ("write_safetensors",),
        "mplug.checkpoint.wanted": ("Wanted",),
        "mplug.config.binding": ("RunConfig",),
        "mplug.config.described": ("DescribedModel", "PublicSettings"),
        "mplug.config.family": ("Family", "Source"),
        "mplug.config.sum_format": ("SumFormat",),
        "mplug.contracts.fields": (
            "MAY_CHANGE",
            "MAY_MOVE",
            "OF_TRAINING",
            "distinct",
        ),
        "mplug.contracts.loader": (
            "Loader",
            "Stateful",
        ),
        "mplug.contracts.micro_batch": (
            "DOCUMENTS",
            "IGNORED",
            "LOSS_WEIGHTS",
            "MicroBatch",
            "RankBatch",
        ),
        "mplug.contracts.optimizer": (
            "Optimizer",
            "Piece",
            "StepScalars",
            "WeightExchange",
        ),
        "mplug.contracts.stepper": (
            "Pipeline",
            "Record",
            "Relay",
            "StepResult",
            "Stepper",
        ),
        "mplug.contracts.streams": (
            "Medium",
            "Processor",
            "RETURNS",
            "STREAMS",
            "WHOLE_SEQUENCE",
            "Seen",
        ),
        "mplug.contracts.tokenizer": (
            "CorpusTokenizer",
            "FolderTokenizer",
            "Tokenizer",
        ),
        "mplug.contracts.variance": ("Variance",),
        "mplug.distributed.supervision": ("Hang", "Monitor", "PluginMessage", "Send", "Supervisor"),
        "mplug.errors": ("RunError", "UsageError", "brief", "counted", "listed", "quoted", "some_names"),
        "mplug.gradients.owned_memory": ("Shard",),
        "mplug.gradients.sinks": ("GradientSink", "Sinks"),
        "mplug.layout.conversion": ("Conversion", "conversion_of"),
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
        "mplug.layout.inits": ("Entries", "Inits"),
        "mplug.layout.mesh": ("Axis", "IndexMap", "Mesh", "contiguous"),
        "mplug.layout.ownership": ("Bucket", "Engine", "Sharding", "Stretch"),
        "mplug.layout.placement": ("Box", "Placement"),
        "mplug.layout.plan": (
            "Answering",
            "Buffer",
            "ENCODER_TEXTS",
            "Init",
            "Parameter",
            "Plan",
            "Segment",
            "Shift",
            "Stages",
            "Stream",
            "Unit",
        ),
        "mplug.layout.plan_within": ("plan_within",),
        "mplug.layout.ranks": ("Grouping", "Ranks"),
        "mplug.layout.work": ("ActivationProduct", "Branches", "Flops", "Step", "WeightProduct", "Window", "Work"),
        "mplug.model.plans.adapters": ("Adapters", "Merge", "RowNorms", "row_norms"),
        "mplug.model.plans.declaring": ("Declared", "declare", "parameter"),
        "mplug.model.plans.description": ("Description", "describe"),
        "mplug.model.products.gathered_copies": ("GatheredCopies", "gathered_copies"),
        "mplug.model.slots.kernel": ("kernel",),
        "mplug.model.model": ("Model",),
        "mplug.model.slots.offers": ("Offer", "Site", "UNIT", "Wrap"),
        "mplug.model.slots.slot_buffer": ("SlotBuffer",),
        "mplug.registry.open_lists": ("OpenList",),
        "mplug.precisions.dtypes": ("FORMATS",),
        "mplug.precisions.precision": ("Precision", "Recipe", "rounding_of_sums"),
        "mplug.registry.implementation": ("hookimpl",),
        "mplug.registry.stores": ("local_path", "local_prefix"),
        "mplug.run.activity": ("Activity", "READING"),
        "mplug.run.metrics_file": ("read_records", "scalars"),
        "mplug.run.run": ("Run",),
        "mplug.run.toolchain": ("triton_builds",),
        "mplug.model.slots.declaration": ("Slot", "set_defaults", "slots_named", "slots_of"),
        "mplug.system.files": ("sync_file", "sync_path", "write_whole"),
        "mplug.tensors.supplier": ("Statements", "Supplier", "statements_of"),
        "mplug.training.map_loader": ("MapLoader",),
        "mplug.training.evaluator": ("Evaluator",),
        "mplug.training.stepper": ("DefaultStepper",),
        "mplug.training.torch_optimizer": ("TorchOptimizer",),
    },
)
