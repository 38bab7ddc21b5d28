"""The kit for testing a plugin: a test suite per kind of plugin, and `run_workers` for functions on several ranks."""

from typing import TYPE_CHECKING

from mplug.lazy import publish

if TYPE_CHECKING:
    from mplug.registry.precisions import precision_named as precision_named
    from mplug.testing.adapters import AdapterSuite as AdapterSuite
    from mplug.testing.commands import CommandSuite as CommandSuite
    from mplug.testing.data import DataSuite as DataSuite
    from mplug.testing.extensions import ExtensionSuite as ExtensionSuite
    from mplug.testing.kernels import KernelSuite as KernelSuite
    from mplug.testing.memory import MemorySuite as MemorySuite
    from mplug.testing.models import ModelSuite as ModelSuite
    from mplug.testing.optimizers import DenseStep as DenseStep
    from mplug.testing.optimizers import OptimizerSuite as OptimizerSuite
    from mplug.testing.parallel import ParallelSuite as ParallelSuite
    from mplug.testing.plugin_check import suite_of as suite_of
    from mplug.testing.precisions import PrecisionSuite as PrecisionSuite
    from mplug.testing.suite import Fault as Fault
    from mplug.testing.suite import PluginSuite as PluginSuite
    from mplug.testing.suite import require as require
    from mplug.testing.suite import smoke as smoke
    from mplug.testing.tokenizers import TokenizerSuite as TokenizerSuite
    from mplug.testing.workers import WorkerFailed as WorkerFailed
    from mplug.testing.workers import run_workers as run_workers

publish(
    __name__,
    {
        "mplug.registry.precisions": ("precision_named",),
        "mplug.testing.adapters": ("AdapterSuite",),
        "mplug.testing.commands": ("CommandSuite",),
        "mplug.testing.data": ("DataSuite",),
        "mplug.testing.extensions": ("ExtensionSuite",),
        "mplug.testing.kernels": ("KernelSuite",),
        "mplug.testing.memory": ("MemorySuite",),
        "mplug.testing.models": ("ModelSuite",),
        "mplug.testing.optimizers": ("DenseStep", "OptimizerSuite"),
        "mplug.testing.parallel": ("ParallelSuite",),
        "mplug.testing.plugin_check": ("suite_of",),
        "mplug.testing.precisions": ("PrecisionSuite",),
        "mplug.testing.suite": ("Fault", "PluginSuite", "require", "smoke"),
        "mplug.testing.tokenizers": ("TokenizerSuite",),
        "mplug.testing.workers": ("WorkerFailed", "run_workers"),
    },
)
