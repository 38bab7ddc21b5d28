"""Measure the limits of the machine, so that a result can be given as a fraction of its limit.

M tokens of a micro batch, I and O input and output width of a linear layer; B samples, S sequence, H query heads,
G KV heads, K head dim. All of them are this rank's own, local sizes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Model, Run
from mplug.commands import IN_CPU_MEMORY, build_model
from mplug_bench.clocks import Clocks
from mplug_bench.probes import COPIED, REPEATS, WARMUP, Work, beside_products, copy_within, cpu_links, launches
from mplug_bench.probes import products as usual_products
from mplug_estimates import measure_bytes, timed
from mplug_nn import AttentionInputs, AttentionSpec, Narrow, Operand, Sink
from mplug_nn.linear import PLAIN, Linear
from mplug_nn.product import COMPOSED
from mplug_ops import all_gather

SUSTAINED = {"cuda": 0.5, "cpu": 0.0}
"""Seconds for which work runs before it is measured: a GPU that computes all the time has lower clocks."""
BETWEEN_READINGS = 0.02
"""Seconds of work between two readings of the clock, for which the CPU waits."""
SENT = {"cuda": (2**20, 2**24, 2**27), "cpu": (2**20,)}
"""Numbers of bytes of a collective's whole tensor."""


ATTENDED = {"cuda": (1024, 4096, 32768), "cpu": (64,)}
"""Lengths of the sequences with which the attention of a model is measured, one after another."""
ATTENDING = {"cuda": 32768, "cpu": 64}
"""Tokens of all sequences of one length together."""


@dataclass(frozen=True)
class Limits:
    """The limits of the machine for a run.

    `rates` are measured rates, by a description with their unit. `classes` maps classes of time, as a profile names
    them, to the seconds per step that this rank's work of the class takes on its own. `clocks` has the clock (MHz) and
    `watts` the power of the GPU during the work of a rate, where NVML reports them; `chip` has the GPU's own limits.
    """

    rates: dict[str, float] = field(default_factory=dict)
    classes: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    watts: dict[str, float] = field(default_factory=dict)
    chip: dict[str, float] = field(default_factory=dict)


class Probing:
    """Measures work for `Limits`, and the clock of the GPU meanwhile."""

    def __init__(self, device: str) -> None:
        self.device, self.clocks = device, Clocks(device)
        self.limits = Limits(chip=self.clocks.facts)

    def seconds(self, name: str, call: Callable[[], object]) -> float:
        """The median seconds of a call, after it has run until the chip is as hot as in a step."""
        usual = timed(call, WARMUP, self.device)[-1]
        together = max(round(BETWEEN_READINGS / max(usual, 1e-6)), 1)
        reading = self.clocks.during(lambda: timed(call, together, self.device), SUSTAINED[self.device])
        if reading is not None:
            self.limits.clocks[name], self.limits.watts[name] = reading.mhz, reading.watts
        return median(timed(call, REPEATS, self.device))

    def rate(self, name: str, works: Iterable[Work]) -> float:
        """Add the TFLOP/s over all of a step's calls; return the seconds that they take."""
        flops, seconds = 0, 0.0
        for work in works:
            flops += work.flops * work.calls
            seconds += self.seconds(name, work.prepare()) * work.calls
        self.limits.rates[name] = flops / seconds / 1e12
        return seconds


def ceilings(run: Run, of_machine: bool = True) -> Limits:
    """Measure the machine, and the work of the run's model by itself. Collective: all processes must call it.

    Without `of_machine`, work of usual shapes is left out, whose rates do not depend on the model.
    """
    model, device = build_model(run), run.device
    probing = Probing(device)
    rates, classes = probing.limits.rates, probing.limits.classes
    name = "copy within memory, read and written, TB/s"
    copies = 2 * COPIED[device] / probing.seconds(name, copy_within(device))
    rates[name] = copies / 1e12
    if of_machine:
        for what, work in usual_products(run.precision.activation_dtype, device).items():
            probing.rate(f"{what}, TFLOP/s", [work])
        for what, (moved, call) in beside_products(run.precision.activation_dtype, device).items():
            rates[f"{what}, TB/s"] = moved / probing.seconds(f"{what}, TB/s", call) / 1e12
        rates.update({**cpu_links(device), **launches(device)})
    rates.update(_bus_rates(run))
    for kind, what, works in (
        ("GEMM", "the model's own products", products(run, model)),
        ("attention", "attention forward and backward", attentions(run, model)),
    ):
        if works:
            classes[kind] = probing.rate(f"{what}, TFLOP/s", works)
    for what, work in attention_by_length(run, model).items():
        probing.rate(f"{what}, TFLOP/s", [work])
    if works := supplied_products(run, model):
        probing.rate("the model's own linear layers in 8 bits with casts, TFLOP/s", works)
    classes["optimizer"] = _bytes_of_an_update(run, model) / copies
    return probing.limits


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


def supplied_products(run: Run, model: Model) -> list[Work]:
    """Forward, dgrad and wgrad of the linear layers that a supplier computes in 8 bits, by its own functions.

    So casts of inputs, of gradients and of weights count, as in a pass; layers of one shape are measured together.
    """
    assert model.passes is not None, "the model is not built"
    if run.precision.recipe is None:
        return []
    tokens, counts, parts = run.micro_batch_size * _own_length(run), Counter[tuple[int, ...]](), {}
    for name, part in model.module.named_modules():
        if isinstance(part, Linear) and part.product is not COMPOSED and part.gemm is PLAIN:
            shape = model.placement_of(f"{name}.weight").local_shape(run.rank)
            counts[shape] += 1
            parts[shape] = part
    return [
        Work(6 * tokens * shape[0] * shape[1], layers * _micro_batches(run), partial(_layer, run, parts[shape], shape))
        for shape, layers in counts.items()
    ]


def _layer(run: Run, part: Linear, shape: tuple[int, ...]) -> Callable[[], object]:
    of = partial(torch.randn, device=run.device, dtype=run.precision.activation_dtype)
    out, wide = shape
    tokens, product = run.micro_batch_size * _own_length(run), part.product
    buffers = {
        name: torch.ones(buffer.shape, dtype=buffer.dtype, device=run.device)
        for name, buffer in part.buffers_of("weight").items()
    }
    x, values, grad_y, around = of(tokens, wide), of(out, wide), of(tokens, out), Narrow()
    weight = Operand(values, product.cast(values, buffers))
    sink = Sink(torch.zeros(out, wide, device=run.device), torch.zeros((), dtype=torch.bool))

    def call() -> None:
        _, saved = product.forward(x, weight, around, buffers)
        _, operands = product.dgrad(grad_y, weight, saved, around, buffers, True)
        product.wgrad(operands, sink, around, buffers)

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
    samples, length = run.micro_batch_size, _own_length(run)
    pairs = run.micro_batch_size * _own_length(run) * run.config.trainer.seq_length  # a causal mask leaves half of them
    return [
        Work(
            (7 if backward else 2) * (1 if causal else 2) * pairs * heads * width,
            layers * _micro_batches(run),
            partial(_attend, run, core, (samples, length), (heads, groups, width), backward, causal),
        )
        for (core, heads, groups, width, backward, causal), layers in counts.items()
    ]


def attention_by_length(run: Run, model: Model) -> dict[str, Work]:
    """Causal attention of the model's first site, forward and forward with backward, by the length of a sequence."""
    found = dict[str, Work]()
    first = next(iter(attentions(run, model)), None)
    if first is None or _own_length(run) != run.config.trainer.seq_length:  # ranks that share a sequence exchange it
        return found
    _, core, _, (heads, groups, width), _, causal = first.prepare.args  # type: ignore[attr-defined]
    for length in ATTENDED[run.device]:
        samples = ATTENDING[run.device] // length
        for backward, factor in ((False, 2), (True, 7)):
            flops = factor * samples * length**2 * heads * width
            name = f"attention of {length} tokens, forward{' and backward' if backward else ''}"
            prepare = partial(_attend, run, core, (samples, length), (heads, groups, width), backward, True)
            if causal:
                found[name] = Work(flops, 1, prepare)
    return found


def _attend(
    run: Run,
    core: Callable[..., Tensor],
    sequences: tuple[int, int],
    sizes: tuple[int, int, int],
    backward: bool,
    causal: bool,
) -> Callable[[], object]:
    """A call of attention in (number, length) of sequences, with (query heads, KV heads, head dim) in `sizes`."""
    dtype, (heads, groups, width) = run.precision.activation_dtype, sizes
    q, k, v = (
        torch.randn(*sequences, number, width, device=run.device, dtype=dtype, requires_grad=backward)
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
