"""Tensors in files: offload to a disk (NVMe) by the operating system.

A tensor in a file is a shared memory map. The operating system keeps its pages in memory while there is room, writes
them to the disk, and reads them again when they are used. The file has no name once it is mapped, so nothing is left
after any kind of end. DeepSpeed's own reads and writes (ZeRO-Infinity, arXiv 2104.07857) serve an update that handles
one group of parameters after the other. The host's update needs the norm of all gradients first, and then passes over
all pieces.
"""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mplug import RunError

LEAST = 1 << 16
"""Smaller tensors stay in memory."""


def in_file(x: Tensor, folder: Path) -> Tensor:
    """A copy of a contiguous tensor on the CPU, in a file of the folder. RunError if the disk has no room for it."""
    size = x.numel() * x.element_size()
    try:
        with NamedTemporaryFile(dir=folder, prefix="mplug-") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))  # otherwise a full disk would end the process later
            mapped = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype)
    except OSError as error:
        raise RunError(
            f"parallel.deepspeed keeps what it offloads in files of '{folder}', and {size / 2**30:.3g} GiB cannot be "
            f"written there: {error.strerror}; free some room, or use another folder (parallel.deepspeed.nvme_path)"
        ) from error
    mapped.copy_(x.detach().flatten())
    return mapped.view(x.shape)


class StatesInFiles(TorchDispatchMode):
    """While it is active, new fp32 tensors on the CPU of `LEAST` bytes or more are in files of a folder.

    So masters, gradients and optimizer states are never all in memory at once, also while they are made.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operator, in a file if it is such a tensor and shares no memory with an argument."""
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or any(one.alias_info is not None for one in func._schema.returns):
            return found
        is_state = found.dtype == torch.float32 and found.device.type == "cpu" and found.is_contiguous()
        return in_file(found, self.folder) if is_state and found.nbytes >= LEAST else found


def move_weights(zero: Any, folder: Path) -> None:
    """Move the partitions of stage 3's weights, which its optimizer keeps in one buffer for each group, to files."""
    flats, buffers = zero.fp16_partitioned_groups_flat, zero.param_groups_fp16_flat_cpu_memory
    for number, buffer in enumerate(buffers):
        mapped = buffers[number] = in_file(buffer, folder)
        for group, flat in enumerate(flats):
            if flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                flats[group] = mapped.narrow(0, flat.storage_offset(), flat.numel())
                zero._unflatten_partitioned_parameters(group)
