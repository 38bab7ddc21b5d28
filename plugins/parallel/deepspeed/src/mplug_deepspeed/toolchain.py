"""Whether DeepSpeed's operators can be built on this machine: it compiles them when they are first used."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from mplug import UsageError


def missing(needs_nvcc: bool = False) -> list[str]:
    """The tools that building an operator needs and that this machine lacks, as the user would look for them."""
    compiler = os.environ.get("CXX", "c++")
    found = []
    if shutil.which(compiler) is None:
        found.append(f"a C++ compiler ('{compiler}' is not in the PATH; set CXX)")
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        found.append("ninja (pip install ninja)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        found.append("Python's headers (Python.h; the package python3-dev)")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if needs_nvcc and shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").exists():
        found.append("CUDA's compiler ('nvcc' is not in the PATH; set CUDA_HOME)")
    return found


def refuse_without_toolchain(optimizer: str, needs_nvcc: bool = False) -> None:
    """Raise UsageError if DeepSpeed cannot build the operator of an optimizer; it names what is missing."""
    if find_spec("deepspeed") is None:
        raise UsageError(f"optimizer.name={optimizer} needs the package deepspeed; install it: pip install deepspeed")
    lacking = missing(needs_nvcc)
    if lacking:
        raise UsageError(
            f"optimizer.name={optimizer}: DeepSpeed builds this optimizer's operator when it is first used, and this "
            f"machine lacks {', and '.join(lacking)}; install it, or use the optimizer 'adamw'"
        )
