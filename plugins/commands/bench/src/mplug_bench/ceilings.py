"""Measure the limits of the machine, so that a result can be given as a fraction of its limit.

M tokens of a micro batch, I and O input and output width of a linear layer; B samples, S sequence, H query heads,
G KV heads, K head dim. All of them are this rank's own, local sizes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Model, Run
from mplug.commands import IN_CPU_MEMORY, build_model
from mplug_estimates import measure_bytes, timed
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.linear import Linear
from mplug_ops import all_gather

REPEATS, WARMUP = 20, 3
SQUARES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 512)}
"""Numbers of rows and columns of the square products, ascending."""
SUSTAINED = {"cuda": 0.5, "cpu": 0.0}
"""Seconds for which work runs before it is measured: a GPU that computes all the time has lower clocks."""
COPIED = {"cuda": 2**30, "cpu": 2**24}
"""Number of bytes that are copied within memory."""
SENT = {"cuda": (2**20, 2**24, 2**27), "cpu": (2**20,)}
"""Numbers of bytes of a collective's whole tensor."""


@dataclass(frozen=True)
class Limits:
    """The limits of the machine for a run.

    `rates` are measured rates, by a description with their unit. `classes` maps classes of time, as a profile names
    them, to the seconds per step that this rank's work of the class takes on its own.
    """

    rates: dict[str, float] = field(default_factory=dict)
    classes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A part of a step: FLOPs per call, calls per step; `prepare` makes the operands, and returns the call."""

    flops: int
    calls: int
    prepare: Callable[[], Callable[[], object]]


def ceilings(run: Run) -> Limits:
    """Measure the machine, and the work of the run's model by itself. Collective: all processes must call it."""
    model, device, precision = build_model(run), run.device, run.precision
    copies = _bytes_per_s_copied(device)
    squares = {
        size: Work(2 * size**3, 1, partial(_square, size, precision.activation_dtype, device))
        for size in SQUARES[device]
    }
    rates = {
        **{
            f"{precision.activations} product of {size} x {size} matrices, TFLOP/s": _rate([work], device)[0]
            for size, work in squares.items()
        },
        "copy within memory, read and written, TB/s": copies / 1e12,
        **_bus_rates(run),
    }
    classes: dict[str, float] = {}
    for kind, what, works in (
        ("GEMM", "the model's own products", products(run, model)),
        ("attention", "attention forward and backward", attentions(run, model)),
    ):
        if works:
            rates[f"{what}, TFLOP/s"], classes[kind] = _rate(works, device)
    return Limits(rates, classes | {"optimizer": _bytes_of_an_update(run, model) / copies})


def _rate(works: Iterable[Work], device: str) -> tuple[float, float]:
    """(TFLOP/s over all of a step's calls, the seconds that they take), from the median call of each work."""
    flops, seconds = 0, 0.0
    for work in works:
        call = work.prepare()
        _sustain(call, device)
        flops += work.flops * work.calls
        seconds += median(timed(call, REPEATS, device)) * work.calls
    return flops / seconds / 1e12, seconds


def _sustain(call: Callable[[], object], device: str) -> None:
    """Run the work until the chip is as hot as in a step."""
    began = perf_counter()
    timed(call, WARMUP, device)
    while perf_counter() - began < SUSTAINED[device]:
        timed(call, REPEATS, device)


def _square(size: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def _bytes_per_s_copied(device: str) -> float:
    """Bytes read and written per second."""
    source, target = (torch.ones(COPIED[device] // 4, device=device) for _ in range(2))
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), REPEATS, device))


def _bus_rates(run: Run) -> dict[str, float]:
    """GB/s of NCCL's bus bandwidth, which does not depend on the number of ranks if the links are the limit."""
    ranks = run.mesh.world_size
    if run.groups is None or ranks == 1:
        return {}
    group, found = run.groups.of(run.mesh.everyone), dict[str, float]()
    for size in SENT[run.device]:
        whole = torch.zeros(size // 4 // ranks * ranks, device=run.device)
        part = whole[: len(whole) // ranks].clone()
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (2.0, partial(dist.all_reduce, whole, group=group)),
            "all-gather": (1.0, partial(all_gather, part, group, 0)),
        }
        for name, (factor, call) in calls.items():
            timed(call, WARMUP, run.device)
            seconds = median(timed(call, REPEATS, run.device))
            found[f"{name} of {size >> 20} MiB, bus GB/s"] = factor * (ranks - 1) / ranks * whole.nbytes / seconds / 1e9
    return found


# The model's own work.


def products(run: Run, model: Model) -> list[Work]:
    """Forward, dgrad and wgrad of every linear layer of this rank, as plain products; layers of one shape together.

    Gradients that are not computed because parameters are frozen are left out.
    """
    tokens, passes = run.micro_batch_size * _own_length(run), model.passes
    assert passes is not None, "the model is not built"
    names = [name for name, part in model.module.named_modules() if isinstance(part, Linear)]
    counts = Counter(
        (
            model.placement_of(f"{name}.weight").local_shape(run.rank),
            f"{name}.weight" not in passes.no_dgrad,
            f"{name}.weight" not in passes.no_wgrad,
        )
        for name in names
    )
    return [
        Work(
            2 * tokens * out * wide * (1 + dgrad + wgrad),
            layers * _micro_batches(run),
            partial(_products, run, tokens, out, wide, dgrad, wgrad),
        )
        for ((out, wide), dgrad, wgrad), layers in counts.items()
    ]


def _products(run: Run, tokens: int, out: int, wide: int, dgrad: bool, wgrad: bool) -> Callable[[], object]:
    of = partial(torch.randn, device=run.device, dtype=run.precision.activation_dtype)
    x, weight, grad_y = of(tokens, wide), of(out, wide), of(tokens, out)

    def call() -> None:
        torch.mm(x, weight.t())  # [M, O]
        if dgrad:
            torch.mm(grad_y, weight)  # [M, I]
        if wgrad:
            torch.mm(grad_y.t(), x)  # [O, I]

    return call


CAUSAL = AttentionSpec(1.0, 1, 1)
"""The masks of a site that states none."""


def attentions(run: Run, model: Model) -> list[Work]:
    """Attention of tokens to one another, forward and backward, with the core of each site of this rank.

    Equal sites are counted together. Windows are left out: the time is that of whole attention. Backward counts 2.5
    times the forward pass, because it recomputes the scores (FlashAttention-2, arXiv 2307.08691).
    """
    assert model.passes is not None, "the model is not built"
    of_streams = tuple(f"{unit.name}." for unit in model.plan.units if unit.sequence in model.plan.streams)
    filled = {slot.site.name: slot.site.module for slot in model.slots if slot.site.slot == "Attention.core"}
    counts = Counter(
        (part.core, *_own_heads(run, part), part.head_dim, name not in model.passes.no_backward, spec.causal)
        for name, part in filled.items()
        if not (spec := getattr(part, "spec", CAUSAL)).cross and not name.startswith(of_streams)
    )
    pairs = run.micro_batch_size * _own_length(run) * run.config.trainer.seq_length  # a causal mask leaves half of them
    return [
        Work(
            (7 if backward else 2) * (1 if causal else 2) * pairs * heads * width,
            layers * _micro_batches(run),
            partial(_attend, run, core, heads, groups, width, backward, causal),
        )
        for (core, heads, groups, width, backward, causal), layers in counts.items()
    ]


def _attend(
    run: Run, core: Callable[..., Tensor], heads: int, groups: int, width: int, backward: bool, causal: bool
) -> Callable[[], object]:
    shape, dtype = (run.micro_batch_size, _own_length(run)), run.precision.activation_dtype
    q, k, v = (
        torch.randn(*shape, number, width, device=run.device, dtype=dtype, requires_grad=backward)
        for number in (heads, groups, groups)
    )  # [B, S, H, K], [B, S, G, K]
    spec = AttentionSpec(width**-0.5, width, width, causal=causal)
    if not backward:
        return lambda: core(q, k, v, spec, AttentionInputs())
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(core(q, k, v, spec, AttentionInputs()), (q, k, v), grad)


def _own_heads(run: Run, part: Any) -> tuple[int, int]:
    """(query heads, KV heads) of this rank; it has at least one KV head, a copy if there are more ranks than heads."""
    found = []
    for named, number in (("heads", part.num_heads), ("kv_heads", part.num_kv_heads)):
        for axis in run.mesh.views["dense"]:
            number = number // axis.size if named in axis.splits else number
        found.append(max(number, 1))
    return found[0], found[1]


def _own_length(run: Run) -> int:
    """Number of sequence positions in this rank's entries."""
    length = run.config.trainer.seq_length
    for axis in run.mesh.views["dense"]:
        if "sequence" in axis.entries:
            index = run.mesh.index(run.rank, axis.name)
            length = sum(map(len, axis.entries["sequence"](length, axis.size, index)))
    return length


def _micro_batches(run: Run) -> int:
    """Number of micro batches of a step on this rank."""
    return run.config.trainer.global_batch_size // run.mesh.batch_shard(run.rank)[1] // run.micro_batch_size


def _bytes_of_an_update(run: Run, model: Model) -> int:
    """The minimum bytes that an update moves: masters and state read and written, gradients read, weights written.

    This function replaces the model's parameters by fake tensors without memory.
    """
    held = measure_bytes(run, model)
    weights, state = held.get("weights", 0), held.get("optimizer state", 0)
    state += held.get(IN_CPU_MEMORY, 0)
    masters = 2 * held["masters"] + weights if "masters" in held else 2 * weights
    return masters + 2 * state + held.get("gradients", 0)
