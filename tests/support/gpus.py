"""What tests on several GPUs share."""

import torch
import torch.distributed as dist


def with_nccl() -> None:
    """Change the worker's process group to one of its GPU's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    prefixed = dist.PrefixStore("nccl", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=prefixed, rank=rank, world_size=size)
