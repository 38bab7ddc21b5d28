"""The FLOPs that a model's plan states, compared with the products that torch counts in a forward pass."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mplug.contracts.micro_batch import MicroBatch
from mplug.errors import listed
from mplug.layout.plan import TOKENS_AXIS
from mplug.layout.work import Flops
from mplug.model.plans.work import flops_of_work
from mplug.model.slots.fill import sites
from mplug.model.units import run_units
from mplug_nn import AttentionSpec
from mplug_testing.blueprint import other_functions
from mplug_testing.mixer_flops import note_mixers
from mplug_testing.model_checks import SAMPLES, Trial
from mplug_testing.suite import Fault, require


def _attention_on_cpu(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """The FLOPs of torch's fused attention on CPUs over all pairs of a query and a key.

    torch's counter does not know this operator.
    """
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu}


@torch.no_grad()
def require_flops(trial: Trial, core_flops: Callable[..., Flops]) -> None:
    """The plan's FLOPs are three times those of a forward pass, as torch counts matrix products.

    The check replaces the slot of attention by a core that multiplies nothing. It counts H K multiply-adds with
    keys and as many with values for each pair that the site's mask leaves: S² / 2 of them if it is causal, S² if it
    is not, and those inside of a window (`AttentionSpec.flops`). Each costs 6 FLOPs with backward.
    The cores of scans and short convolutions are replaced likewise (`note_mixers`).
    For a core other than softmax attention, `core_flops` states the FLOPs. If a model does not use the slot, the
    check estimates attention from the growth of the count with the length, and the plan must not state less. In
    both cases, the modules must not state more (`plan_work`) than the plan.
    """
    calls: list[tuple[str, tuple[Any, ...]]] = []
    streams = [f"{unit.name}." for unit in trial.model.plan.units if unit.sequence != TOKENS_AXIS]
    for site in sites(trial.model.module):
        if site.slot == "Attention.core":
            is_counted = not site.name.startswith(tuple(streams))
            site.module.core = _noting(calls if is_counted else [], other_functions(site))
    of_mixers = note_mixers(list(sites(trial.model.module)))
    batch = trial.batches[0]
    counted = _products(trial, batch)
    if not calls and not of_mixers:
        _require_no_fewer_flops(trial, counted)
        _require_work_of_plan(trial)
        return
    stated, weights = trial.model.plan.flops, 3 * counted // batch["tokens"].numel()
    cores = [_flops_of(call, other, core_flops) for other, call in calls]
    per_token = sum(core.per_token for core in cores) + sum(of_mixers)
    pairs = Flops.sum(core.of_pairs for core in cores)
    more = f", and its cores {per_token:,}" if per_token else ""
    require(
        stated.per_token == weights + per_token,
        f"the plan states {stated.per_token:,} FLOPs per token, and the products with weights need {weights:,}{more}",
    )
    functions = {other for other, _ in calls} - {""}
    cores_need = f"cores of {listed(sorted(functions))} need" if functions else "attention, by its masks, needs"
    require(
        stated.per_squared_length == pairs.per_squared_length,
        f"the plan states {stated.per_squared_length:,} FLOPs per squared length, and {cores_need} "
        f"{pairs.per_squared_length:,}",
    )
    require(
        dict(stated.windows) == dict(pairs.windows),
        f"the plan states these FLOPs per pair: {_of_windows(stated)}; and {cores_need} {_of_windows(pairs)}",
    )
    _require_work_of_plan(trial)


def _require_work_of_plan(trial: Trial) -> None:
    """The FLOPs that modules state are a part of the plan's: a frozen model skips some of them."""
    of_tokens = {unit.name for unit in trial.model.plan.units if unit.sequence == TOKENS_AXIS}
    own = [one for one in trial.model.work if one.unit in of_tokens]
    stated, found = trial.model.plan.flops, flops_of_work(own)
    require(
        found.per_token <= stated.per_token,
        f"the modules state {found.per_token:,} FLOPs per token (plan_work), and the plan {stated.per_token:,}, so "
        f"a run with frozen parameters would skip more than there is",
    )


def _products(trial: Trial, batch: MicroBatch) -> int:
    """The FLOPs of the products and convolutions of tokens that torch can count in a forward pass."""
    values, total = dict(batch), 0
    for unit in trial.model.plan.units:
        counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
        with counter:
            values = run_units(trial.model.module, [unit], values)
        total += int(counter.get_total_flops()) if unit.sequence == TOKENS_AXIS else 0
    return total


def _require_no_fewer_flops(trial: Trial, counted: int) -> None:
    """A lower bound from forward passes of two lengths.

    The part that grows with the length counts per token, as exactly as torch counts; a causal mask may leave a
    query one key more than half of all. The part that grows with the squared length counts half, because attention
    may have computed what a causal mask discards. torch does not see what a kernel of the model itself multiplies.
    """
    stated, length = trial.model.plan.flops, trial.batches[0]["tokens"].shape[1]
    part = length // 2
    whole, less = (
        Fraction(3 * count, SAMPLES) for count in (counted, _products(trial, trial.shortened(trial.batches[0], part)))
    )
    squared = max(Fraction(), (whole / length - less / part) / (length - part))
    per_token = whole / length - squared * length if squared else (whole - less) / (length - part)
    how = f"in forward passes of {part} and {length} tokens per sample, torch counts"
    hint = "if the model computes in chunks, set trainer.seq_length to at least two chunks"
    require(
        stated.per_token >= per_token - squared,
        f"the plan states {stated.per_token:,} FLOPs per token; {how} {float(per_token):,.0f} with backward; {hint}",
    )
    require(
        stated.per_squared_length >= squared / 2,
        f"the plan states {stated.per_squared_length:,} FLOPs per squared length; {how} {float(squared):,.0f} with "
        f"backward, and a causal mask leaves half of them; {hint}",
    )


def _noting(calls: list[tuple[str, tuple[Any, ...]]], other: str) -> Callable[..., Tensor]:
    """A core that multiplies nothing, and records its function and its arguments."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> Tensor:
        calls.append((other, (q, k, v, *rest[:1])))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    return nothing


def _flops_of(call: tuple[Any, ...], other: str, core_flops: Callable[..., Flops]) -> Flops:
    """The FLOPs of one call of a core: of softmax attention, or of the function `other`."""
    if not other:
        q, k, v = call[:3]
        if getattr(call[3], "cross", False):
            return Flops(6 * q.shape[2] * (q.shape[3] + v.shape[3]) * k.shape[1], 0)
        pair = 6 * q.shape[2] * (q.shape[3] + v.shape[3])
        return call[3].flops(pair) if isinstance(call[3], AttentionSpec) else Flops(0, pair // 2)
    try:
        return core_flops(*call)
    except NotImplementedError as error:
        raise Fault(f"its sites need '{other}', whose FLOPs are unknown: {error}") from None


def _of_windows(flops: Flops) -> str:
    """The FLOPs of each window, for messages."""
    found = [f"{pair:,} in {'causal' if one.causal else 'full'} windows of {one.size}" for one, pair in flops.windows]
    return listed(found) if found else "none"
