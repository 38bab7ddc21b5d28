"""The current process becomes one of those of its run."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mplug.distributed.world import World
from mplug_launch.meeting import GPU, gpu_of, interfaces, meet, member, num_threads, open_store


@contextmanager
def joined(
    world: World,
    device: str,
    timeout: timedelta | None = None,
    exchanging: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Make this process part of its world for the block: set its GPU, its threads, torch's default process group.

    `timeout` is torch's time-out for a collective. The context manager that `exchanging` returns is entered after the
    processes have met, and surrounds the rest of the block.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    gpu = gpu_of(int(os.environ.get(GPU, world.local_rank)), gpus) if gpus else 0
    if gpus:
        torch.cuda.set_device(gpu)
    # A restarted agent keeps its store, and ranks would read the addresses of the previous attempt (pytorch #135712).
    # Another job may use the same port: its processes have another prefix and do not read these keys.
    store = PrefixStore(f"{world.job}_attempt_{world.restart}", open_store(world))
    own = member(world.address, device, str(torch.cuda.get_device_properties(gpu).uuid) if gpus else "", gpus)
    decision = meet(world, store, own)
    os.environ |= interfaces(world, own, decision)
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(num_threads(own.cpus, decision.cpus, torch.get_num_threads()))
    options: dict[str, Any] = {"backend": "gloo"}
    if gpus:
        torch.zeros((), device="cuda", requires_grad=True).backward()  # creates the CUDA context of autograd's thread
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")  # known, and intended
        options = {"backend": "nccl", "device_id": torch.device("cuda", gpu)}
    with exchanging():
        dist.init_process_group(store=store, rank=world.rank, world_size=world.size, timeout=timeout, **options)
        yield
        gc.collect()  # a CUDA graph in a reference cycle would keep the communicators in use that it has recorded
        dist.destroy_process_group()  # not after an error: it would wait for the other ranks
