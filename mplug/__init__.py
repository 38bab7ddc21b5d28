"""mplug trains large transformers; every part that someone might want to replace is a plugin.

Plugin authors import this module, `mplug.tensors`, `mplug.commands`, and the distributions beside the host
(docs/architecture.md), such as `mplug_nn` and `mplug_ops`. This module imports no torch.
"""

from typing import TYPE_CHECKING

from mplug import hookspecs as _hookspecs  # noqa: F401 (fills the table of specifications)
from mplug.system.lazy import publish
from mplug.system.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig as RunConfig
    from mplug.config.family import Family as Family
    from mplug.config.family import Source as Source
    from mplug.config.sum_format import SumFormat as SumFormat
    from mplug.contracts.fields import MAY_CHANGE as MAY_CHANGE
    from mplug.contracts.fields import MAY_MOVE as MAY_MOVE
    from mplug.contracts.fields import OF_TRAINING as OF_TRAINING
    from mplug.contracts.fields import distinct as distinct
    from mplug.contracts.gatherer import Gatherer as Gatherer
    from mplug.contracts.loader import Loader as Loader
    from mplug.contracts.loader import Stateful as Stateful
    from mplug.contracts.micro_batch import ADVANTAGES as ADVANTAGES
    from mplug.contracts.micro_batch import DOCUMENTS as DOCUMENTS
    from mplug.contracts.micro_batch import IGNORED as IGNORED
    from mplug.contracts.micro_batch import LOSS_WEIGHTS as LOSS_WEIGHTS
    from mplug.contracts.micro_batch import MARGINS as MARGINS
    from mplug.contracts.micro_batch import REFERENCE as REFERENCE
    from mplug.contracts.micro_batch import SAMPLED as SAMPLED
    from mplug.contracts.micro_batch import SEQUENCES as SEQUENCES
    from mplug.contracts.micro_batch import TOP_TAUGHT as TOP_TAUGHT
    from mplug.contracts.micro_batch import TOP_TOKENS as TOP_TOKENS
    from mplug.contracts.micro_batch import MicroBatch as MicroBatch
    from mplug.contracts.micro_batch import RankBatch as RankBatch
    from mplug.contracts.optimizer import AVERAGE as AVERAGE
    from mplug.contracts.optimizer import Optimizer as Optimizer
    from mplug.contracts.optimizer import Piece as Piece
    from mplug.contracts.optimizer import ShapedState as ShapedState
    from mplug.contracts.optimizer import StepScalars as StepScalars
    from mplug.contracts.optimizer import WeightExchange as WeightExchange
    from mplug.contracts.optimizer import updated_on as updated_on
    from mplug.contracts.rates import RateSchedule as RateSchedule
    from mplug.contracts.rates import RateSettings as RateSettings
    from mplug.contracts.rates import ends_with_run as ends_with_run
    from mplug.contracts.stepper import ForwardStepper as ForwardStepper
    from mplug.contracts.stepper import Pipeline as Pipeline
    from mplug.contracts.stepper import Record as Record
    from mplug.contracts.stepper import Relay as Relay
    from mplug.contracts.stepper import Stepper as Stepper
    from mplug.contracts.stepper import StepResult as StepResult
    from mplug.contracts.streams import RETURNS as RETURNS
    from mplug.contracts.streams import STREAMS as STREAMS
    from mplug.contracts.streams import WHOLE_SEQUENCE as WHOLE_SEQUENCE
    from mplug.contracts.variance import Traffic as Traffic
    from mplug.contracts.variance import Variance as Variance
    from mplug.distributed.supervision import Send as Send
    from mplug.distributed.supervision import Supervisor as Supervisor
    from mplug.errors import RunError as RunError
    from mplug.errors import UsageError as UsageError
    from mplug.errors import brief as brief
    from mplug.errors import counted as counted
    from mplug.errors import listed as listed
    from mplug.errors import quoted as quoted
    from mplug.errors import some_names as some_names
    from mplug.gradients.region import region as region
    from mplug.gradients.sinks import GradientSink as GradientSink
    from mplug.gradients.sinks import Sinks as Sinks
    from mplug.layout.inits import Entries as Entries
    from mplug.layout.inits import Inits as Inits
    from mplug.layout.mesh import Axis as Axis
    from mplug.layout.mesh import DocumentMap as DocumentMap
    from mplug.layout.mesh import IndexMap as IndexMap
    from mplug.layout.mesh import Mesh as Mesh
    from mplug.layout.mesh import Ranges as Ranges
    from mplug.layout.mesh import contiguous as contiguous
    from mplug.layout.ownership import Bucket as Bucket
    from mplug.layout.ownership import Engine as Engine
    from mplug.layout.ownership import Sharding as Sharding
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
    from mplug.layout.plan import Stream as Stream
    from mplug.layout.plan import Unit as Unit
    from mplug.layout.ranks import Grouping as Grouping
    from mplug.layout.ranks import Ranks as Ranks
    from mplug.layout.stages import Stages as Stages
    from mplug.layout.widths import Widths as Widths
    from mplug.layout.work import ActivationProduct as ActivationProduct
    from mplug.layout.work import Branches as Branches
    from mplug.layout.work import Flops as Flops
    from mplug.layout.work import Step as Step
    from mplug.layout.work import WeightProduct as WeightProduct
    from mplug.layout.work import Window as Window
    from mplug.layout.work import Work as Work
    from mplug.model.assembler import Assembler as Assembler
    from mplug.model.model import Model as Model
    from mplug.model.plans.declaring import Declared as Declared
    from mplug.model.plans.declaring import declare as declare
    from mplug.model.plans.declaring import parameter as parameter
    from mplug.model.plans.description import Description as Description
    from mplug.model.plans.description import describe as describe
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

publish(__name__)
