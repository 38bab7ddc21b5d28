"""Bitwise reproducible computation: set torch's switches for it in a block, and restore them afterwards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor
from torch.utils import deterministic as torch_memory

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that fixes cuBLAS's workspaces; cuBLAS reads it once per process, before its first product."""


@contextmanager
def deterministic() -> Iterator[None]:
    """In the block, torch gives the same bits for the same computation, or raises if it cannot.

    The block must begin before the process has used cuBLAS. Plugins' kernels read `trainer.deterministic` themselves.
    """
    memory: Any = torch_memory  # a module with a property, which types cannot say
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, workspace = memory.fill_uninitialized_memory, os.environ.get(WORKSPACE)
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a debugging aid against uninitialised reads; it costs a memory pass
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        with inductor.patch(deterministic=True):  # inductor then does not choose kernels by timing
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            del os.environ[WORKSPACE]
