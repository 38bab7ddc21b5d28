"""Profile the time of a step by class of kernel (on a GPU) or of operator (on a CPU)."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

RECORDED = 3
"""Number of recorded steps."""
HEAD_START = 500_000_000
"""Clock cycles that a GPU spins before the recorded steps: else it would wait for the first launch, unlike in a run."""
SPIN = "spin_kernel"
"""A part of the names of kernels that only spin."""
LONGEST = 30
GAPS, OTHER, COLLECTIVES = "gaps", "other", "collectives"
CLASSES = {
    COLLECTIVES: r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|\b(send|recv)\b|"
    r"send_rows|rows_back|push_rows|memcpy ptop",
    "scan": r"causal_conv1d|^(chunk_(fwd|bwd|gated|gla|kda|local|global)|fused_recurrent|recompute_w_u|prepare_wy|"
    r"solve_tril|merge_16x16|compute_dh0|gdn_gate|kda_gate)",
    "loss": r"cross_?entropy|log_?softmax|softmax_online|nll_?loss|logsumexp",
    "attention": r"flash|fmha|attention|sdpa|softmax|compute_dot_do_o|convert_dq",
    "optimizer": r"adam|(multi_tensor|foreach)(?!.*copy)|\blamb\b|\bsgd|muon",
    "GEMM": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|\bmm\b|addmm|bmm|linear|mkldnn|matmul|grouped_(mm|product)",
    "sort and gather": r"sort|topk|searchsorted|devicescan|scan_innermost|index_?select|index_elementwise|"
    r"gather_kernel|scatter_gather|repeat_interleave|compute_cuda_kernel|\bmeet\b|"
    r"aten::(gather|scatter|scatter_add|cumsum|index)_?\b",
    "copies and fills": r"copy|take_rows|memcpy|memset|fill|catarray|\bcat\b|zero_|clone|contiguous",
    "norm and activation": r"norm|gammabeta|gelu|silu|sigmoid|tanh|erf|rotat|elementwise|vectorized|reduce_kernel|"
    r"\b(add|mul|sub|div|sum|mean|cos|sin|pow)_?\b",
}
"""Classes of time, in the order in which they are tried, each with a regex for the names of its kernels.

Attention comes before GEMM, because the names of FlashAttention's kernels contain names of CUTLASS. A copy between two
GPUs ("PtoP") is a collective's. A GPU that waits for such a copy of another GPU runs no kernel: the wait is a gap.
"""
PRECEDENCE = (
    *("GEMM", "attention", "scan", "optimizer", "loss", "norm and activation", OTHER),
    *("sort and gather", "copies and fills", COLLECTIVES),
)
"""If kernels overlap, the first class in this order gets the time: hidden time of a collective counts for the other."""
FUSED = re.compile(r"triton_(poi|red|per|for|unk|mix|split_scan)_fused_?(.*?)_?\d*$")
"""Inductor's fused kernels: their names list their operators, in alphabetical order."""
MOVING = re.compile(
    r"(^|_)_?(scaled_dot_product(_fused|_cudnn|_flash|_efficient)?_attention|(add|b)?mm|linear|to_copy|clone|copy|cat|"
    r"stack|unsafe_view|view|reshape|transpose|permute|split_with_sizes|split|slice_scatter|slice|select_scatter|select|"
    r"unsqueeze|squeeze|expand|new_zeros|zeros_like|zeros|new_empty|empty_like|empty|full_like|full|constant_pad_nd|fill|"
    r"as_strided|alias|getitem|t)(_backward)?(?=_|$)"
)
"""Operators that only move values; also products and attention, for which a fused kernel only prepares operands."""


@dataclass(frozen=True)
class Event:
    """An executed kernel; `start` and `end` are in seconds of the device's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Kernel:
    """A kernel (or operator) by its name: seconds per step, and calls per step."""

    name: str
    kind: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """The profile of a step, in seconds per step.

    On a GPU, `classes` (including gaps) add up to the step: if kernels overlap, `PRECEDENCE` decides which class gets
    the time. `collectives` is the time in which any collective ran, hidden or not. On a CPU, the values are sums of the
    operators' own times.
    """

    classes: dict[str, float]
    collectives: float
    longest: list[Kernel]

    @property
    def step(self) -> float:
        """The seconds of the recorded step."""
        return sum(self.classes.values())


def class_of(name: str) -> str:
    """The class of a kernel by its name; 'other' if none matches."""
    fused = FUSED.match(name)
    if fused is not None:
        return _class_of_fused(fused[1], fused[2])
    lowered = "gemm" if name.startswith(("triton_tem_fused", "triton_mm")) and "attention" not in name else name.lower()
    return next((kind for kind, words in CLASSES.items() if re.search(words, lowered)), OTHER)


def _class_of_fused(prefix: str, operators: str) -> str:
    """The class of a kernel that inductor fused: never a collective or a product, whose operands it may prepare."""
    if prefix == "for" or re.search(CLASSES["optimizer"], operators):
        return "optimizer"
    if re.search(CLASSES["loss"], operators):
        return "loss"
    if re.search(r"(^|_)softmax", operators):
        return "attention"
    if re.search("embedding", operators) and not re.search("norm", operators):
        return OTHER
    computed = MOVING.sub("", operators).strip("_")
    if re.search(r"(^|_)(sort|topk|searchsorted|index|cumsum|scatter|gather)(_|$)", computed):
        return "norm and activation" if re.search("norm|gelu|silu", computed) else "sort and gather"
    return "norm and activation" if computed else "copies and fills"


def by_class(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each class, and of `gaps` (nothing ran), from the first start to the last end."""
    borders = sorted(
        border
        for event in events
        for border in ((event.start, 1, class_of(event.name)), (event.end, -1, class_of(event.name)))
    )
    found: dict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    before = borders[0][0] if borders else 0.0
    for time, change, kind in borders:
        if time > before:
            found[next((kind for kind in PRECEDENCE if running[kind]), GAPS)] += time - before
        running[kind] += change
        before = time
    return {GAPS: 0.0, **found}


def longest(spent: Iterable[tuple[str, float]], steps: int) -> list[Kernel]:
    """The kernels with the most time among `spent`: (name, seconds) of each call in `steps` steps."""
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, took in spent:
        seconds[name] += took
        calls[name] += 1
    names = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST]
    return [Kernel(name, class_of(name), seconds[name] / steps, calls[name] / steps) for name in names]


def profile_of(events: Sequence[Event], steps: int = RECORDED) -> Profile:
    """The profile of `steps` equal steps, from all their kernels in any order.

    Kernels before the end of the spinning are left out, and so is waiting of the CPU, which CUPTI reports too.
    """
    began = max((event.end for event in events if SPIN in event.name), default=0.0)
    events = [event for event in events if event.start >= began and not event.name.endswith(" Sync")]
    alone = [event for event in events if class_of(event.name) == COLLECTIVES]
    in_all = by_class(alone).get(COLLECTIVES, 0.0)
    classes = {kind: seconds / steps for kind, seconds in by_class(events).items()}
    return Profile(classes, in_all / steps, longest(((e.name, e.end - e.start) for e in events), steps))


def profiled(step: Callable[[], None], device: str) -> Profile:
    """The profile of `RECORDED` calls of `step`."""
    import torch  # the rest of this module needs no torch, so that a report starts quickly
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.startswith("cuda")
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorder:  # `acc_events` silences a warning of torch
        if on_gpu:
            torch.cuda._sleep(HEAD_START)
        for _ in range(RECORDED):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found = list(recorder.events() or ())
    if on_gpu:
        kernels = [event for event in found if event.device_type.name == "CUDA" and not event.is_user_annotation]
        return profile_of([_kernel(event) for event in kernels])
    operators = [event for event in found if event.name.startswith(("aten::", "c10d::", "gloo:", "mplug::"))]
    return _of_operators([(event.name, event.self_cpu_time_total / 1e6) for event in operators])


WAITED = re.compile("called a synchronizing CUDA operation")
"""The warning of torch's synchronisation debug mode."""


def waits_of(step: Callable[[], None], device: str) -> dict[str, int] | None:
    """How often the CPU waits for the GPU in one call of `step`, by place (file and line); None on a CPU.

    These are the waits that `torch.cuda.set_sync_debug_mode` detects: every read of a value, not every other wait.
    """
    import torch

    if not device.startswith("cuda"):
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = (one for one in found if WAITED.search(str(one.message)))
    return dict(Counter(f"{'/'.join(one.filename.split('/')[-2:])}:{one.lineno}" for one in waits))


def _kernel(event: Any) -> Event:
    return Event(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)


def _of_operators(spent: Sequence[tuple[str, float]]) -> Profile:
    classes: dict[str, float] = defaultdict(float)
    for name, seconds in spent:
        classes[class_of(name)] += seconds / RECORDED
    return Profile(dict(classes), classes.get(COLLECTIVES, 0.0), longest(spent, RECORDED))
