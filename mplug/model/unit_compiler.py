"""What the host asks of the package that compiles the units of a model (`trainer.compile`)."""

import logging
from typing import Protocol

from mplug.model.model import Model
from mplug.registry.provided import needed, provided
from mplug.run.run import Run

log = logging.getLogger("mplug")


class UnitCompiler(Protocol):
    """The method of the class in the entry-point group 'mplug.compilers'."""

    def compile_units(self, run: Run, model: Model) -> None:
        """Compile each unit of this rank as one graph, with the backend that the config names, if it names one."""


def refuse_missing_compiler(run: Run) -> None:
    """Raise UsageError if the config names a backend and no compiler of units is installed."""
    setting = run.config.trainer.compile
    if setting not in ("auto", "never"):
        needed("compilers", f"trainer.compile={setting}", "mplug-compile")


def compile_units(run: Run, model: Model) -> None:
    """Compile the units as the config says."""
    compiler: UnitCompiler | None = provided("compilers")
    if compiler is not None:
        compiler.compile_units(run, model)
    elif run.config.trainer.compile == "auto" and run.device.startswith("cuda"):
        log.warning("units are not compiled: mplug-compile is not installed")
