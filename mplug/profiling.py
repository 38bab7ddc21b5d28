"""Where the time of a step goes, by class of kernel (on a GPU) or of operator (on a CPU)."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
CLASSES = {
    "collectives": r"nccl|gloo|c10d|all_reduce|all_gather|reduce_scatter|all_to_all|send|recv",
    "attention": r"flash|fmha|attention|sdpa|cudnn_generated.*(fwd|bwd|dgrad)",
    "GEMM": r"gemm|cutlass|nvjet|xmma|cublas|\bmm\b|addmm|bmm|linear|mkldnn|matmul",
    "optimizer": r"adam|multi_tensor|foreach|lamb|sgd",
    "loss": r"softmax|nll_loss|cross_entropy",
    "norm and activation": r"norm|gelu|silu|triton|sigmoid|tanh|erf|elementwise|vectorized|add|mul|reduce_kernel",
    "copies and fills": r"copy|memcpy|memset|fill|cat|zero|clone|contiguous|to_copy",
}
"""Classes of time, in the order in which they are tried -> what the names of their kernels have in them."""


def by_class(step: Callable[[], None], device: str) -> dict[str, float]:
    """Seconds a step spends in each class, and in `gaps`, when the device had nothing to do."""
    on_gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if _counts(event, on_gpu)]
    found: dict[str, float] = {}
    for event in events:
        kind, seconds = class_of(event.name), _seconds(event, on_gpu)
        found[kind] = found.get(kind, 0.0) + seconds / STEPS
    return {**found, "gaps": _gaps(events) / STEPS} if on_gpu else found


def class_of(name: str) -> str:
    """The class of a kernel by its name; 'other' where none fits."""
    lowered = name.lower()
    return next((kind for kind, words in CLASSES.items() if re.search(words, lowered)), "other")


def _counts(event: Any, on_gpu: bool) -> bool:
    if on_gpu:
        return bool(event.device_type.name == "CUDA" and not event.is_user_annotation)
    return bool(event.name.startswith(("aten::", "c10d::", "gloo:", "mplug::")))


def _seconds(event: Any, on_gpu: bool) -> float:
    return float(event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6


def _gaps(events: list[Any]) -> float:
    """Seconds between the first and the last kernel in which none ran."""
    gaps, end = 0.0, None
    for span in sorted((event.time_range for event in events), key=lambda span: span.start):
        if end is not None and span.start > end:
            gaps += span.start - end
        end = max(end or span.end, span.end)
    return gaps / 1e6
