"""Names of kernels, and a small run, for the tests of `mplug bench` and of its yardstick."""

from typing import Any

GEMM, FLASH, NCCL, COPY = "nvjet_one", "flash_fwd", "ncclDevKernel_AllReduce", "Memcpy DtoD"
SMALL = {"model.num_layers": 2, "model.hidden_size": 32, "model.num_attention_heads": 2, "trainer.seq_length": 32}


def small(**changes: Any) -> list[str]:
    return [f"{name}={value}" for name, value in {**SMALL, **changes}.items()]
