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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mplug import RunError

if TYPE_CHECKING:
    from mplug import Optimizer, Piece


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


def move(x: Tensor, folder: Path) -> None:
    """Move the values of a tensor to a file. The tensor stays the same object."""
    x.data = in_file(x, folder)


def move_weights(zero: Any, folder: Path) -> None:
    """Move the partitions of stage 3's weights, which its optimizer keeps in one buffer for each group, to files."""
    flats, buffers = zero.fp16_partitioned_groups_flat, zero.param_groups_fp16_flat_cpu_memory
    for number, buffer in enumerate(buffers):
        mapped = buffers[number] = in_file(buffer, folder)
        for group, flat in enumerate(flats):
            if flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                flats[group] = mapped.narrow(0, flat.storage_offset(), flat.numel())
                zero._unflatten_partitioned_parameters(group)


def move_states(optimizer: "Optimizer", pieces: "list[Piece]", folder: Path) -> None:
    """Move the states of pieces to files; RunError if the optimizer does not compute with the tensors that it names."""
    for piece in pieces:
        states = {name: state for name, state in optimizer.state(piece).items() if state.shape == piece.master.shape}
        for state in states.values():
            move(state, folder)
        for name, state in states.items():
            if optimizer.state(piece)[name].data_ptr() != state.data_ptr():
                raise RunError(
                    f"parallel.deepspeed.offload_optimizer with nvme_path: the optimizer makes the state '{name}' of "
                    f"'{piece.name}' anew in every call of `state`, so it cannot be moved to a file; use another "
                    f"optimizer, or offload to the host's memory"
                )
