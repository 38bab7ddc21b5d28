"""Transformer Engine itself: whether this machine can run it, and its import.

`library()` is called inside operators. `missing()` is called before a run starts.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

DISTRIBUTION, SERIES = "transformer_engine", "2.20"
"""The functions below Transformer Engine's modules change from one minor release to the next."""
INSTALL = "install 'mplug-te[te]'"
OLDEST_CHIP = (8, 0)
CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH")
"""Environment variables by which Transformer Engine finds cuDNN; it reads them in this order."""


def missing(device: str) -> str:
    """Why a run on a device ('cuda', 'cpu') cannot use Transformer Engine, or the empty string."""
    if reason := _not_installed():
        return reason
    if device != "cuda":
        return "Transformer Engine needs a CUDA GPU, and this run is on the CPU"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CHIP:
        chip = ".".join(map(str, capability))
        return f"it supports GPUs of compute capability 8.0 and newer, and this GPU has {chip}"
    return _broken()


def _not_installed() -> str:
    try:
        found = version(DISTRIBUTION)
    except PackageNotFoundError:
        return f"Transformer Engine is not installed; {INSTALL}"
    if not f"{found}.".startswith(f"{SERIES}."):
        return f"it supports Transformer Engine {SERIES}, and {found} is installed; {INSTALL}"
    return ""


@cache
def _broken() -> str:
    """Why Transformer Engine cannot be imported; checked before a run starts, not in its first step."""
    try:
        library()
    except Exception as error:  # the import runs Transformer Engine's own checks, which may raise anything
        return f"Transformer Engine is installed, and its import fails: {str(error).strip().partition(chr(10))[0]}"
    return ""


@cache
def library() -> SimpleNamespace:
    """The parts of Transformer Engine that the operators call; `numbers` are its numbers of torch's dtypes."""
    with _one_cudnn():
        te = import_module("transformer_engine.pytorch")
    utils = import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    extensions = import_module("transformer_engine.pytorch.cpp_extensions")
    enums = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    numbers = import_module("transformer_engine.pytorch.constants").TE_DType
    tex = import_module("transformer_engine_torch")
    return SimpleNamespace(te=te, utils=utils, enums=enums, extensions=extensions, tex=tex, numbers=numbers)


@contextmanager
def _one_cudnn() -> Iterator[None]:
    """Make the import use the cuDNN that torch has loaded, or else that of torch's wheels.

    Trap: Transformer Engine prefers a cuDNN of the system, so that a process may load two versions of it.
    """
    folder = _folder_of_cudnn()
    if folder is None or any(name in os.environ for name in CUDNN_VARIABLES):
        yield
        return
    for file in sorted(folder.glob("libcudnn*.so.9")):  # all parts: a missing one would come from the system
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    os.environ[CUDNN_VARIABLES[0]] = str(folder)
    try:
        yield
    finally:
        del os.environ[CUDNN_VARIABLES[0]]


def _folder_of_cudnn() -> Path | None:
    """The folder of this process's libcudnn, or of that in torch's wheels; None if there is neither."""
    maps = Path("/proc/self/maps")
    mapped = (line.split()[-1] for line in maps.read_text().splitlines()) if maps.exists() else ()
    loaded = next((Path(word).parent for word in mapped if "/libcudnn.so" in word), None)
    if loaded is not None:
        return loaded
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") is not None else None
    folders = [] if spec is None else [Path(folder) / "lib" for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def number_of(dtype: torch.dtype) -> int:
    """The number by which Transformer Engine knows a dtype of torch."""
    number: int = library().numbers[dtype]
    return number
