"""The kit for testing a plugin: a test suite per kind of plugin, and `run_workers` for functions on several ranks."""

from typing import TYPE_CHECKING, Any

from mplug.testing.workers import WorkerFailed, run_workers

if TYPE_CHECKING:
    from mplug.testing.commands import CommandSuite
    from mplug.testing.data import DataSuite
    from mplug.testing.extensions import ExtensionSuite
    from mplug.testing.kernels import KernelSuite
    from mplug.testing.memory import MemorySuite
    from mplug.testing.models import ModelSuite
    from mplug.testing.optimizers import DenseStep, OptimizerSuite
    from mplug.testing.parallel import ParallelSuite
    from mplug.testing.suite import Fault, PluginSuite, require, smoke
    from mplug.testing.tokenizers import TokenizerSuite

_LATE = {
    "CommandSuite": "commands",
    "DataSuite": "data",
    "DenseStep": "optimizers",
    "ExtensionSuite": "extensions",
    "Fault": "suite",
    "KernelSuite": "kernels",
    "MemorySuite": "memory",
    "ModelSuite": "models",
    "OptimizerSuite": "optimizers",
    "ParallelSuite": "parallel",
    "PluginSuite": "suite",
    "TokenizerSuite": "tokenizers",
    "require": "suite",
    "smoke": "suite",
}
"""Names that are imported on first use, because a suite imports what its kind needs."""


def suite_of(kind: str) -> "type[PluginSuite]":
    """The suite for plugins of a kind: 'kernels' -> KernelSuite."""
    name = next(name for name, module in _LATE.items() if module == kind and name.endswith("Suite"))
    suite: type[PluginSuite] = __getattr__(name)
    return suite


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'mplug.testing' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"mplug.testing.{_LATE[name]}"), name)


__all__ = [
    "CommandSuite",
    "DataSuite",
    "DenseStep",
    "ExtensionSuite",
    "Fault",
    "KernelSuite",
    "MemorySuite",
    "ModelSuite",
    "OptimizerSuite",
    "ParallelSuite",
    "PluginSuite",
    "TokenizerSuite",
    "WorkerFailed",
    "require",
    "run_workers",
    "smoke",
    "suite_of",
]
