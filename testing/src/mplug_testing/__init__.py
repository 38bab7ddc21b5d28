"""The kit for testing a plugin: a test suite per kind of plugin, and `run_workers` for functions on several ranks."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug.registry.precisions import precision_named as precision_named
    from mplug_testing.adapters import AdapterSuite as AdapterSuite
    from mplug_testing.commands import CommandSuite as CommandSuite
    from mplug_testing.data import DataSuite as DataSuite
    from mplug_testing.extensions import ExtensionSuite as ExtensionSuite
    from mplug_testing.formats import FormatSuite as FormatSuite
    from mplug_testing.kernels import KernelSuite as KernelSuite
    from mplug_testing.memory import MemorySuite as MemorySuite
    from mplug_testing.models import ModelSuite as ModelSuite
    from mplug_testing.objectives import ObjectiveSuite as ObjectiveSuite
    from mplug_testing.optimizers import DenseStep as DenseStep
    from mplug_testing.optimizers import OptimizerSuite as OptimizerSuite
    from mplug_testing.parallel import ParallelSuite as ParallelSuite
    from mplug_testing.precisions import PrecisionSuite as PrecisionSuite
    from mplug_testing.suite import Fault as Fault
    from mplug_testing.suite import PluginSuite as PluginSuite
    from mplug_testing.suite import require as require
    from mplug_testing.suite import smoke as smoke
    from mplug_testing.tokenizers import TokenizerSuite as TokenizerSuite
    from mplug_testing.workers import WorkerFailed as WorkerFailed
    from mplug_testing.workers import run_workers as run_workers

publish(__name__)
